//! `transom explain`: which rules a request would meet, and where its keys stand. Asks the running gateway at its admin
//! address; if none runs at that of the configuration, explains by the configuration, with empty windows.

use std::path::Path;

use bytes::Bytes;
use http::Request;
use http::header::{ACCEPT, CONTENT_TYPE};
use http_body_util::Full;
use serde_json::{Map, Value, json};
use tokio::runtime::{Builder, LocalOptions};

use super::admin_client::{self, AskedGateway, RunningGateway};
use super::{Exit, add_copied_clients, read_config};
use crate::explain::explain_without_gateway;
use crate::explain::question::Question;
use crate::file_watch::FileWatch;
use transom_config::Config;
use transom_http::client_address::ClientAddress;

/// Options of `transom explain`.
#[derive(clap::Args)]
pub struct Options {
    /// Method of the request, by default GET, or POST with a body
    #[arg(short = 'X', long = "request", value_name = "METHOD")]
    method: Option<String>,
    /// Header of the request, `Name: value`; may be repeated
    #[arg(short = 'H', long = "header", value_name = "HEADER", value_parser = parse_header)]
    headers: Vec<(String, String)>,
    /// Body of the request, or `@FILE`; `@-`: the standard input
    #[arg(short = 'd', long = "data", value_name = "BODY", value_parser = read_data, default_value = "")]
    body: String,
    /// Address that the request comes from; `unix:` for a Unix socket
    #[arg(long, value_name = "IP", default_value_t = Question::CLIENT)]
    client: ClientAddress,
    /// Client whose request it is, whatever its headers and address
    #[arg(long, value_name = "NAME")]
    as_client: Option<String>,
    /// Print the explanation as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    gateway: AskedGateway,
    /// URL of the request
    url: String,
}

/// `Name: value`, or `Name;` for an empty value, as curl reads it.
fn parse_header(text: &str) -> Result<(String, String), String> {
    let named = text.split_once(':').or_else(|| Some((text.strip_suffix(';')?, "")));
    let (name, value) = named.ok_or("write `Name: value`")?;
    Ok((name.to_owned(), value.trim().to_owned()))
}

/// A body, or that of a file.
fn read_data(text: &str) -> Result<String, String> {
    let Some(file) = text.strip_prefix('@') else { return Ok(text.to_owned()) };
    let read = if file == "-" { std::io::read_to_string(std::io::stdin()) } else { std::fs::read_to_string(file) };
    read.map_err(|error| error.to_string())
}

impl Options {
    fn method(&self) -> &str {
        self.method.as_deref().unwrap_or(Question::method_with(&self.body))
    }

    /// The body of `POST /v1/explain` that asks about the request.
    fn to_json(&self) -> Value {
        let mut headers: Map<String, Value> = Map::new();
        for (name, value) in &self.headers {
            let values = headers.entry(name.to_ascii_lowercase()).or_insert_with(|| json!([]));
            values.as_array_mut().into_iter().for_each(|values| values.push(json!(value)));
        }
        json!({
            "method": self.method(), "url": self.url, "headers": headers,
            "body": Some(&self.body).filter(|body| !body.is_empty()),
            "client": self.client.to_string(), "as_client": self.as_client,
        })
    }
}

pub fn explain(path: &Path, options: &Options) -> Exit {
    let question = match Question::new(options.method(), &options.url, &options.headers, options.client) {
        Ok(question) => Question { body: options.body.clone(), as_client: options.as_client.clone(), ..question },
        Err(message) => {
            print_err!("transom: {message}");
            return Exit::BadConfig;
        }
    };
    let given = options.gateway.address.given();
    // The file may be that of another gateway, or on another machine.
    let read = given.is_none().then(|| read_config(path, &mut FileWatch::default())).transpose();
    let config = match read {
        Ok(config) => config,
        Err(invalid) => {
            print_err!("{}", invalid.to_string().trim_end());
            return Exit::BadConfig;
        }
    };
    let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default());
    let explained = runtime.map_err(|error| error.to_string()).and_then(|runtime| {
        let token = options.gateway.token.read(config.as_ref())?;
        let address = given.map(str::to_owned).or_else(|| admin_client::admin_address(config.as_ref()?));
        let gateway = address.map(|address| RunningGateway { address, token });
        runtime.block_on(async {
            if let Some(gateway) = &gateway
                && let Some(explained) = ask_gateway(gateway, options).await?
            {
                return Ok(explained);
            }
            let address = gateway.map(|gateway| gateway.address);
            let Some(mut config) = config else {
                return Err(format!("no gateway runs at the admin address {}", address.unwrap_or_default()));
            };
            add_copied_clients(&mut config);
            explain_by_config(config, address, &question, options).await
        })
    });
    match explained {
        Ok(text) => {
            print_out!("{}", text.trim_end());
            Exit::Fine
        }
        Err(message) => {
            print_err!("transom: {message}");
            Exit::Failed
        }
    }
}

/// `address`: where no gateway listens.
async fn explain_by_config(
    config: Config,
    address: Option<String>,
    question: &Question,
    options: &Options,
) -> Result<String, String> {
    let explanation = explain_without_gateway(config, question).await?;
    if options.json {
        return Ok(format!("{:#}", explanation.to_json()));
    }
    let why = address.map_or_else(
        || String::from("the configuration has no admin address to ask"),
        |address| format!("no gateway runs at the admin address {address}"),
    );
    Ok(format!("{explanation}\nnote:     {why}: all windows are shown empty"))
}

/// The explanation of the running gateway; `None` if nothing listens at its admin address.
async fn ask_gateway(gateway: &RunningGateway, options: &Options) -> Result<Option<String>, String> {
    let address = &gateway.address;
    let failed = |reason: String| format!("the gateway at http://{address} cannot explain the request: {reason}");
    let request = Request::post("/v1/explain")
        .header(CONTENT_TYPE, "application/json")
        .header(ACCEPT, if options.json { "application/json" } else { "text/plain" });
    let request = request.body(Full::new(Bytes::from(options.to_json().to_string())));
    let request = request.map_err(|error| failed(error.to_string()))?;
    match gateway.send(request).await.map_err(failed)? {
        Some(body) if options.json => {
            let value: Value = serde_json::from_str(&body).map_err(|error| failed(error.to_string()))?;
            Ok(Some(format!("{value:#}")))
        }
        body => Ok(body),
    }
}
