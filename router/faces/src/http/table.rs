//! The rows of the table of pages, from which routes and `/openapi.json` are made. Has no knowledge of pages.

use axum::handler::Handler;
use axum::routing::{self, MethodRouter};
use http::Method;
use router::front::frontend::Frontend;
use std::sync::Arc;

/// One page under one method.
pub struct Route {
    pub method: Method,
    /// In axum's format: `{id}` is one part of a path, `{*id}` the rest of it.
    pub path: &'static str,
    /// Its purpose, in a few words.
    pub about: &'static str,
    pub serve: MethodRouter<Arc<Frontend>>,
}

/// The pages of one API.
pub struct ApiRoutes {
    pub name: &'static str,
    pub keys: KeyRequirement,
    pub routes: Vec<Route>,
}

/// How a page's clients send their key, if keys are required.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyRequirement {
    /// For probes and monitoring, which send no key.
    NotRequired,
    Bearer,
    /// Also as `x-api-key`.
    BearerOrBare,
    /// An operator's key, if there is one.
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
