//! The one path from a request to its events, which all faces share: a request is read, admitted and given to a
//! replica, and its tokens come back as text.
//!
//! Knows neither HTTP nor gRPC, and of replicas only the one that was picked. Read `ask` (a request as a face has
//! parsed it), `generate` (the way in), then `generation` (the way out). `frontend` is what faces hold; `sampling`,
//! `text`, `stop`, `calls` and `deltas` are called on the way, and so are `structure` and `grammars`, which say what an
//! answer must be; `search` looks for likely answers instead of drawing them, by the rules of `beams`; `embed` is the
//! same for embeddings; `resume` is how a client resumes a stream, `certificate` says what an answer came from and
//! hashes it, `hidden` drops the logprobs of hidden thoughts, `progress` tells how far a prompt is, `derender` reads
//! tokens that were drawn elsewhere, `stored` keeps responses and conversations, `reader_watch` gives up streams that
//! nobody reads, `recorder` counts and traces, and `finished_answer` hands whole answers to those who keep them or run
//! them again.

pub mod ask;
pub mod beams;
pub mod calls;
pub mod certificate;
pub mod deltas;
pub mod derender;
pub mod embed;
pub mod finished_answer;
pub mod frontend;
pub mod generate;
pub mod generation;
pub mod grammars;
pub mod hidden;
pub mod prepared;
pub mod progress;
pub mod reader_watch;
pub mod recorder;
pub mod resume;
pub mod sampling;
pub mod sampling_defaults;
pub mod search;
pub mod stop;
pub mod stored;
pub mod structure;
pub mod text;
