//! Streams an answer: `stream ADDRESS[,ADDRESS..] PROMPT [API_KEY]`.

use lockstep_client::v1::generate_reply::Event;
use lockstep_client::v1::generate_request::Input;
use lockstep_client::v1::{Chat, ChatMessage, GenerateRequest, Sampling};
use lockstep_client::{ConnectOptions, LockstepClient};
use std::io::Write;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(addresses), Some(prompt)) = (arguments.next(), arguments.next()) else {
        return Err("usage: stream ADDRESS[,ADDRESS..] PROMPT [API_KEY]".into());
    };
    let options = ConnectOptions { api_key: arguments.next(), ..ConnectOptions::default() };
    let client = LockstepClient::connect(addresses.split(','), &options)?;
    let message = ChatMessage { role: "user".into(), content: prompt, ..ChatMessage::default() };
    let chat = Chat { messages: vec![message], ..Chat::default() };
    let request = GenerateRequest {
        input: Some(Input::Chat(chat)),
        sampling: Some(Sampling { max_tokens: Some(256), ..Sampling::default() }),
        ..GenerateRequest::default()
    };
    // If a router is lost, the answer continues at another one.
    let mut answer = client.generate(request);
    while let Some(event) = answer.next_event().await? {
        match event {
            Event::Delta(delta) => {
                print!("{}", delta.text);
                std::io::stdout().flush()?;
            }
            Event::Finished(finished) => println!("\n{:?}", finished.reason()),
            Event::Started(_) | Event::PromptLogprobs(_) | Event::PromptProgress(_) => {}
        }
    }
    Ok(())
}
