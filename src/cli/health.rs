//! `transom health`: whether the running gateway is ready for requests, for probes of containers.

use std::path::Path;

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use tokio::runtime::{Builder, LocalOptions};

use super::Exit;
use super::admin_client::AdminAddress;

/// Options of `transom health`.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    address: AdminAddress,
}

/// Fails with 1 for every reason, because Docker reserves exit code 2 of a health check.
pub fn health(path: &Path, options: &Options) -> Exit {
    match check(path, options) {
        Ok(address) => {
            print_out!("the gateway at http://{address} is ready");
            Exit::Fine
        }
        Err(message) => {
            print_err!("{message}");
            Exit::Failed
        }
    }
}

/// Returns the address of a gateway that is ready.
fn check(path: &Path, options: &Options) -> Result<String, String> {
    let gateway = options.address.find_readiness(path)?;
    let address = &gateway.address;
    let not_ready = |reason: String| format!("transom: the gateway at http://{address} is not ready: {reason}");
    let request =
        Request::get("/readyz").body(Full::new(Bytes::new())).map_err(|error| not_ready(error.to_string()))?;
    let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default());
    let runtime = runtime.map_err(|error| not_ready(error.to_string()))?;
    match runtime.block_on(gateway.send(request)).map_err(not_ready)? {
        Some(_ready) => Ok(gateway.address),
        None => Err(format!("transom: no gateway listens at http://{address}")),
    }
}
