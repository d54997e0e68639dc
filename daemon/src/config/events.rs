//! The section `[events]`: which copies come and go, for routers.

use std::net::SocketAddr;

use super::read::{Reader, Section};

/// Longest beginning of a topic.
const TOPIC_BYTES_MAX: usize = 256;

/// Where events are published.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EventSettings {
    /// The address that subscribers connect to.
    pub address: SocketAddr,
    /// What topics begin with. Default: `kv@` and the machine's name.
    pub topic: String,
    /// How events are laid out. Default: [`EventLayout::Maps`].
    pub layout: EventLayout,
}

/// How events are laid out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum EventLayout {
    /// Each a map with its type under `type`, as vLLM 0.33 publishes them.
    #[default]
    Maps,
    /// Each an array with its type first, as earlier versions did.
    Arrays,
}

pub(super) fn read_events(
    reader: &mut Reader<'_>,
    mut section: Section<'_, '_>,
) -> Option<EventSettings> {
    let address = section.text(reader, "endpoint").and_then(|found| {
        let address = parse_endpoint(&found.value);
        if address.is_none() {
            let what = format!("`events.endpoint` is \"{}\"", found.value);
            let allowed = "\"tcp://\", an IP address or \"*\", and a port are allowed, such as \
                           \"tcp://127.0.0.1:5557\"; leave it out for no events";
            reader.problem(found.line, what, allowed);
        }
        address
    });
    let topic = section.text(reader, "topic").map(|found| {
        let bytes = found.value.len();
        if bytes > TOPIC_BYTES_MAX {
            let what = format!("`events.topic` has {bytes} bytes");
            reader.problem(found.line, what, format!("at most {TOPIC_BYTES_MAX} are allowed"));
        }
        found.value
    });
    let layouts = [("maps", EventLayout::Maps), ("arrays", EventLayout::Arrays)];
    let layout = section.choice(reader, "layout", &layouts).map(|found| found.value);
    section.finish(reader);
    Some(EventSettings {
        address: address?,
        topic: topic.unwrap_or_else(default_topic),
        layout: layout.unwrap_or_default(),
    })
}

fn parse_endpoint(text: &str) -> Option<SocketAddr> {
    let rest = text.strip_prefix("tcp://")?;
    let rest = rest.strip_prefix("*:").map_or(rest.to_owned(), |port| format!("0.0.0.0:{port}"));
    rest.parse().ok()
}

fn default_topic() -> String {
    let name = rustix::system::uname();
    format!("kv@{}", name.nodename().to_string_lossy())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_as_zeromq_writes_them() {
        let local = "127.0.0.1:5557".parse().unwrap();
        assert_eq!(parse_endpoint("tcp://127.0.0.1:5557"), Some(local));
        assert_eq!(parse_endpoint("tcp://*:5557"), Some("0.0.0.0:5557".parse().unwrap()));
        assert_eq!(parse_endpoint("tcp://[::1]:5557"), Some("[::1]:5557".parse().unwrap()));
        for bad in ["", "127.0.0.1:5557", "tcp://127.0.0.1", "ipc:///x", "tcp://host:5557"] {
            assert_eq!(parse_endpoint(bad), None, "{bad}");
        }
    }
}
