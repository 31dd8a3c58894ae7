//! gRPC reflection with tonic's service, one request at a time. A request without a result gets an error, as the
//! protocol requires, and the stream continues. Has no knowledge of services.

use tokio_stream::StreamExt;
use tonic::codegen::BoxStream;
use tonic::{Request, Response, Status, Streaming};

/// The same service in both versions of the protocol, whose messages differ only in their package.
macro_rules! answering {
    ($name:ident, $version:ident) => {
        pub mod $name {
            use super::*;
            use tonic_reflection::pb::$version::server_reflection_client::ServerReflectionClient;
            use tonic_reflection::pb::$version::server_reflection_response::MessageResponse;
            use tonic_reflection::pb::$version::server_reflection_server::{ServerReflection, ServerReflectionServer};
            use tonic_reflection::pb::$version::{ErrorResponse, ServerReflectionRequest, ServerReflectionResponse};

            struct Answering<T>(ServerReflectionServer<T>);

            pub fn service<T: ServerReflection>(
                known: ServerReflectionServer<T>,
            ) -> ServerReflectionServer<impl ServerReflection> {
                ServerReflectionServer::new(Answering(known))
            }

            #[tonic::async_trait]
            impl<T: ServerReflection> ServerReflection for Answering<T> {
                type ServerReflectionInfoStream = BoxStream<ServerReflectionResponse>;

                async fn server_reflection_info(
                    &self,
                    request: Request<Streaming<ServerReflectionRequest>>,
                ) -> Result<Response<Self::ServerReflectionInfoStream>, Status> {
                    let known = self.0.clone();
                    let answers = request.into_inner().then(move |request| {
                        let known = known.clone();
                        async move { Ok(answer(known, request?).await) }
                    });
                    Ok(Response::new(Box::pin(answers)))
                }
            }

            async fn answer<T: ServerReflection>(
                known: ServerReflectionServer<T>,
                request: ServerReflectionRequest,
            ) -> ServerReflectionResponse {
                let refused = |status: Status| ServerReflectionResponse {
                    valid_host: request.host.clone(),
                    original_request: Some(request.clone()),
                    message_response: Some(MessageResponse::ErrorResponse(ErrorResponse {
                        error_code: status.code().into(),
                        error_message: status.message().to_owned(),
                    })),
                };
                let question = tokio_stream::once(request.clone());
                let reply = match ServerReflectionClient::new(known).server_reflection_info(question).await {
                    Ok(answers) => answers.into_inner().message().await,
                    Err(status) => Err(status),
                };
                match reply {
                    Ok(Some(answer)) => answer,
                    Ok(None) => refused(Status::internal("the reflection service sent no answer")),
                    Err(status) => refused(status),
                }
            }
        }
    };
}

answering!(newer, v1);
answering!(older, v1alpha);
