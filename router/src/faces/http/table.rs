//! The form of the table of pages: routes and `/openapi.json` are made of the same rows. Knows no page.

use crate::front::frontend::Frontend;
use axum::handler::Handler;
use axum::routing::{self, MethodRouter};
use http::Method;
use std::sync::Arc;

/// One page under one method.
pub struct Route {
    pub method: Method,
    /// As axum writes it: `{id}` is one part of a path, `{*id}` all that is left of it.
    pub path: &'static str,
    /// What it is for, in a few words.
    pub about: &'static str,
    pub serve: MethodRouter<Arc<Frontend>>,
}

/// The pages of one API.
pub struct Api {
    pub name: &'static str,
    pub keys: Keys,
    pub routes: Vec<Route>,
}

/// How a page's clients show their key, where keys are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// Probes and monitoring ask without one.
    Unasked,
    Bearer,
    /// Also as `x-api-key`.
    BearerOrBare,
    /// A key with the role of an operator, where there is one.
    Operator,
}

pub fn get<H: Handler<T, Arc<Frontend>>, T: 'static>(path: &'static str, about: &'static str, handler: H) -> Route {
    Route { method: Method::GET, path, about, serve: routing::get(handler) }
}

pub fn head<H: Handler<T, Arc<Frontend>>, T: 'static>(path: &'static str, about: &'static str, handler: H) -> Route {
    Route { method: Method::HEAD, path, about, serve: routing::head(handler) }
}

pub fn delete<H: Handler<T, Arc<Frontend>>, T: 'static>(path: &'static str, about: &'static str, handler: H) -> Route {
    Route { method: Method::DELETE, path, about, serve: routing::delete(handler) }
}

pub fn post<H: Handler<T, Arc<Frontend>>, T: 'static>(path: &'static str, about: &'static str, handler: H) -> Route {
    Route { method: Method::POST, path, about, serve: routing::post(handler) }
}
