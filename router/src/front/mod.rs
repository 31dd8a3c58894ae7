//! The one path from a request to its events, which all faces share: a request is read, admitted and given to a
//! replica, and its tokens come back as text.
//!
//! Knows neither HTTP nor gRPC, and of replicas only the one that was picked. Read `parsed_request` (a request as a
//! face has parsed it), `generate` (the way in) with `submit` (the way to a replica), then `generation` (the way out).
//! `frontend` is the struct that faces hold; `text_work` reads texts, long ones on `threads`; `public_ids` counts the
//! ids that clients see. Requests pass through `sampling` (by the table in `parameters`), `text`, `stop`, `calls` and
//! `deltas` on the way, and through `structure` and `grammars`, which define what an answer must be. `search` looks for
//! likely answers instead of drawing them, by the rules of `beams`; `embed` is the same path for embeddings. `resume`
//! lets a client resume a stream. `certificate` names what an answer came from and hashes it, `hidden` drops the
//! logprobs of hidden thoughts, `progress` reports how far a prompt is, `derender` reads tokens that were drawn
//! elsewhere, `stored` keeps responses and conversations, `reader_watch` gives up unread streams, `recorder` counts and
//! traces, and `finished_answer` hands whole answers to records and audits.

pub mod beams;
pub mod calls;
pub mod certificate;
pub mod decide;
pub mod deltas;
pub mod derender;
pub mod embed;
pub mod finished_answer;
pub mod frontend;
pub mod generate;
pub mod generation;
pub mod grammars;
pub mod hidden;
pub mod parameters;
pub mod parsed_request;
pub mod prepared;
pub mod progress;
pub mod public_ids;
pub mod rank;
pub mod reader_watch;
pub mod recorder;
pub mod resume;
pub mod sampling;
pub mod sampling_defaults;
pub mod search;
pub mod stop;
pub mod stored;
pub mod structure;
mod submit;
pub mod text;
pub mod text_work;
pub mod threads;
