//! The publishing side of ZeroMQ (ZMTP 3.0 over TCP, mechanism NULL, socket type PUB), as much of
//! it as a subscriber needs: <https://rfc.zeromq.org/spec/23/>.
//!
//! A message is dropped for a subscriber whose queue is full, as with any PUB socket; it sees that
//! by the numbers. What a peer sends is bounded, and one that breaks the protocol is let go of.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc};

/// Subscribers at a time.
const PEERS_MAX: usize = 64;

/// Messages that wait for one subscriber.
const QUEUE: usize = 4096;

/// Bytes of a frame that a peer may send: a subscription.
const FRAME_BYTES_MAX: u64 = 1024;

/// Subscriptions of one peer.
const SUBSCRIPTIONS_MAX: usize = 256;

/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);

const GREETING_BYTES: usize = 64;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// The subscribers, and what they want.
#[derive(Default)]
pub(super) struct Publisher {
    peers: Mutex<HashMap<u64, Peer>>,
    next: AtomicU64,
    /// Somebody subscribed to something.
    pub(super) subscribed: Notify,
    /// Messages that subscribers were too slow for.
    pub(super) dropped: AtomicU64,
}

struct Peer {
    topics: Vec<Vec<u8>>,
    queue: mpsc::Sender<Arc<Vec<u8>>>,
}

impl Publisher {
    fn peers(&self) -> MutexGuard<'_, HashMap<u64, Peer>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Subscribers that are connected.
    pub(super) fn subscribers(&self) -> usize {
        self.peers().len()
    }

    /// Sends a message to all who want its topic. Never waits.
    pub(super) fn publish(&self, topic: &[u8], rest: &[&[u8]]) {
        let mut bytes = Vec::new();
        let parts: Vec<&[u8]> = std::iter::once(topic).chain(rest.iter().copied()).collect();
        for (at, part) in parts.iter().enumerate() {
            put_frame(&mut bytes, if at + 1 < parts.len() { MORE } else { 0 }, part);
        }
        let message = Arc::new(bytes);
        for peer in self.peers().values() {
            let wanted = peer.topics.iter().any(|wanted| topic.starts_with(wanted));
            if wanted && peer.queue.try_send(Arc::clone(&message)).is_err() {
                self.dropped.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Takes subscribers, for ever.
    pub(super) async fn serve(self: Arc<Self>, listener: TcpListener) {
        loop {
            match listener.accept().await {
                Ok((stream, from)) if self.subscribers() < PEERS_MAX => {
                    let publisher = Arc::clone(&self);
                    tokio::spawn(async move {
                        if let Err(error) = publisher.peer(stream).await {
                            tracing::debug!(%from, %error, "a subscriber of events is gone");
                        }
                    });
                }
                Ok((_, from)) => tracing::warn!(%from, "all subscribers of events are taken"),
                Err(error) => {
                    tracing::warn!(%error, "cannot take a subscriber of events");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    async fn peer(&self, mut stream: TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let shaken = tokio::time::timeout(HANDSHAKE, shake_hands(&mut stream)).await;
        shaken.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        let (queue, mut messages) = mpsc::channel::<Arc<Vec<u8>>>(QUEUE);
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.peers().insert(number, Peer { topics: Vec::new(), queue: queue.clone() });
        let (mut read, mut write) = stream.into_split();
        let speak = async {
            while let Some(message) = messages.recv().await {
                write.write_all(&message).await?;
            }
            Ok::<(), io::Error>(())
        };
        let ended = tokio::select! {
            ended = self.listen(number, &mut read, &queue) => ended,
            ended = speak => ended,
        };
        self.peers().remove(&number);
        ended
    }

    async fn listen(
        &self,
        peer: u64,
        stream: &mut (impl AsyncRead + Unpin),
        queue: &mpsc::Sender<Arc<Vec<u8>>>,
    ) -> io::Result<()> {
        loop {
            let (flags, body) = read_frame(stream).await?;
            if let Some(reply) = self.heard(peer, flags, &body)? {
                queue.try_send(Arc::new(reply)).map_err(|_| broken("it does not read"))?;
            }
        }
    }

    /// A frame of a peer: a subscription, or a command. What it is answered with, if anything.
    fn heard(&self, peer: u64, flags: u8, body: &[u8]) -> io::Result<Option<Vec<u8>>> {
        let (subscribe, topic) = match (flags & COMMAND, body) {
            (0, [1, topic @ ..]) => (true, topic),
            (0, [0, topic @ ..]) => (false, topic),
            // ZMTP 3.1 has commands for this, and one that asks for a sign of life.
            (COMMAND, [9, b'S', b'U', b'B', b'S', b'C', b'R', b'I', b'B', b'E', topic @ ..]) => {
                (true, topic)
            }
            (COMMAND, [6, b'C', b'A', b'N', b'C', b'E', b'L', topic @ ..]) => (false, topic),
            (COMMAND, [4, b'P', b'I', b'N', b'G', _, _, context @ ..]) => {
                let mut reply = Vec::new();
                put_frame(&mut reply, COMMAND, &[&b"\x04PONG"[..], context].concat());
                return Ok(Some(reply));
            }
            _ => return Ok(None),
        };
        let mut peers = self.peers();
        let Some(peer) = peers.get_mut(&peer) else { return Ok(None) };
        if !subscribe {
            if let Some(at) = peer.topics.iter().position(|wanted| wanted == topic) {
                peer.topics.swap_remove(at);
            }
        } else if peer.topics.len() < SUBSCRIPTIONS_MAX {
            peer.topics.push(topic.to_vec());
            self.subscribed.notify_one();
        } else {
            return Err(broken("it subscribes to too much"));
        }
        Ok(None)
    }
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// Appends a frame.
fn put_frame(out: &mut Vec<u8>, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(short) => out.extend([flags, short]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend((body.len() as u64).to_be_bytes());
        }
    }
    out.extend(body);
}

async fn read_frame(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<(u8, Vec<u8>)> {
    let flags = stream.read_u8().await?;
    let bytes = match flags & LONG {
        0 => u64::from(stream.read_u8().await?),
        _ => stream.read_u64().await?,
    };
    if bytes > FRAME_BYTES_MAX {
        return Err(broken("its frame is too large"));
    }
    let mut body = vec![0; usize::try_from(bytes).unwrap_or(0)];
    stream.read_exact(&mut body).await?;
    Ok((flags, body))
}

/// What both sides begin with: signature, version, mechanism.
fn greeting() -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    let start = [&b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0"[..], &b"NULL"[..]].concat();
    for (byte, value) in bytes.iter_mut().zip(start) {
        *byte = value;
    }
    bytes
}

async fn shake_hands(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> io::Result<()> {
    stream.write_all(&greeting()).await?;
    let mut theirs = [0; GREETING_BYTES];
    stream.read_exact(&mut theirs).await?;
    let ([255, .., 127], [3..=255, ..]) = theirs.split_at(10) else {
        return Err(broken("it does not speak ZMTP 3"));
    };
    let mechanism = theirs.get(12..32).unwrap_or_default();
    if !mechanism.starts_with(b"NULL\0") {
        return Err(broken("it wants another mechanism than NULL"));
    }
    let mut ready = Vec::new();
    put_frame(&mut ready, COMMAND, b"\x05READY\x0bSocket-Type\0\0\0\x03PUB");
    stream.write_all(&ready).await?;
    let (flags, body) = read_frame(stream).await?;
    let is_ready = flags & COMMAND != 0 && body.starts_with(b"\x05READY");
    // SUB or XSUB.
    let subscribes = body.windows(3).any(|window| window == b"SUB");
    if is_ready && subscribes { Ok(()) } else { Err(broken("it is no subscriber")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_short_or_long() {
        let mut out = Vec::new();
        put_frame(&mut out, MORE, b"kv@a");
        assert_eq!(out, b"\x01\x04kv@a");
        out.clear();
        put_frame(&mut out, 0, &[7; 300]);
        assert_eq!(out.get(..9), Some(&b"\x02\0\0\0\0\0\0\x01\x2c"[..]));
        assert_eq!(out.len(), 309);
    }

    #[test]
    fn what_a_peer_wants_is_remembered_within_bounds() {
        let publisher = Publisher::default();
        let (queue, mut messages) = mpsc::channel(2);
        publisher.peers().insert(1, Peer { topics: Vec::new(), queue });
        publisher.publish(b"kv@a", &[b"1"]);
        assert!(messages.try_recv().is_err(), "nobody subscribed");
        assert!(publisher.heard(1, 0, b"\x01kv@").unwrap().is_none());
        assert!(publisher.heard(1, COMMAND, b"\x09SUBSCRIBEx").unwrap().is_none());
        publisher.publish(b"kv@a", &[b"12"]);
        assert_eq!(*messages.try_recv().unwrap(), b"\x01\x04kv@a\0\x0212");
        for _ in 0..3 {
            publisher.publish(b"kv@a", &[]);
        }
        assert_eq!(publisher.dropped.load(Ordering::Relaxed), 1, "two wait for the subscriber");
        assert!(publisher.heard(1, 0, b"\0kv@").unwrap().is_none());
        let pong = publisher.heard(1, COMMAND, b"\x04PING\0\x01abc").unwrap();
        assert_eq!(pong, Some(b"\x04\x08\x04PONGabc".to_vec()));
        let too_many = (0..300).find_map(|_| publisher.heard(1, 0, b"\x01y").err());
        assert!(too_many.is_some());
    }

    #[tokio::test]
    async fn only_subscribers_get_past_the_handshake() {
        let ready = |socket: &str| {
            let mut body = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
            body.push(socket.len() as u8);
            body.extend(socket.as_bytes());
            let mut hello = greeting().to_vec();
            put_frame(&mut hello, COMMAND, &body);
            hello
        };
        let mut plain = greeting().to_vec();
        plain[12..17].copy_from_slice(b"PLAIN");
        let cases = [(ready("SUB"), true), (ready("REQ"), false), (plain, false)];
        for (hello, good) in cases {
            let (mut ours, mut theirs) = tokio::io::duplex(1024);
            theirs.write_all(&hello).await.unwrap();
            assert_eq!(shake_hands(&mut ours).await.is_ok(), good);
        }
        let (mut ours, mut theirs) = tokio::io::duplex(1024);
        theirs.write_all(&[b'G'; 64]).await.unwrap();
        assert!(shake_hands(&mut ours).await.is_err());
    }
}
