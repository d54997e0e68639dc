//! Framing and encoding of a connection after its hello, for both sides.
//!
//! The daemon's side does not let tarpc read deadlines by itself: a deadline far in the future
//! overflows the clock while it is decoded, and one beyond two years panics tarpc's timer. Both are
//! shortened here, before tarpc sees them.

use std::io;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::{Sink, Stream};
use serde::{Deserialize, Serialize};
use tarpc::serde_transport::Transport;
use tarpc::tokio_serde::formats::Bincode;
use tarpc::tokio_serde::{Deserializer, Serializer};
use tarpc::tokio_util::bytes::{Bytes, BytesMut};
use tarpc::tokio_util::codec::{Framed, LengthDelimitedCodec};
use tarpc::{ClientMessage, Request, Response, context, trace};
use tokio::net::UnixStream;

use crate::protocol::{DEADLINE_MAX, FRAME_BYTES_MAX, KvtideRequest, KvtideResponse};

/// Bytes of a connection's buffer at first: a lookup of some hundred keys comes in one read.
const BUFFER_BYTES: usize = 32 << 10;

/// The client's side of a connection.
pub type ClientTransport = Transport<
    UnixStream,
    Response<KvtideResponse>,
    ClientMessage<KvtideRequest>,
    Bincode<Response<KvtideResponse>, ClientMessage<KvtideRequest>>,
>;

/// The daemon's side of a connection.
pub type ServerTransport = HangUp<
    Transport<
        UnixStream,
        ClientMessage<KvtideRequest>,
        Response<KvtideResponse>,
        ServerCodec<KvtideRequest, KvtideResponse>,
    >,
>;

/// Makes the end of the stream an error, [`io::ErrorKind::UnexpectedEof`]: a client that is gone
/// waits for no answers, so its connection ends at once and not after its last call. It is never
/// shut down from here either: the client takes the end of the stream as the daemon's word that
/// nothing copies from or to its regions any more, and only the daemon knows when that is.
#[derive(Debug)]
pub struct HangUp<T>(T);

impl<T, Item> Stream for HangUp<T>
where
    T: Stream<Item = io::Result<Item>> + Unpin,
{
    type Item = io::Result<Item>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut self.0).poll_next(cx).map(|message| {
            Some(message.unwrap_or_else(|| Err(io::ErrorKind::UnexpectedEof.into())))
        })
    }
}

impl<T, Item> Sink<Item> for HangUp<T>
where
    T: Sink<Item, Error = io::Error> + Unpin,
{
    type Error = io::Error;

    fn poll_ready(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_ready(cx)
    }

    fn start_send(mut self: Pin<&mut Self>, item: Item) -> io::Result<()> {
        Pin::new(&mut self.0).start_send(item)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_close(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }
}

/// Frames a client's connection whose hello was answered.
pub fn client_transport(stream: UnixStream) -> ClientTransport {
    tarpc::serde_transport::new(framed(stream), Bincode::default())
}

/// Frames a daemon's connection whose hello was answered.
pub fn server_transport(stream: UnixStream) -> ServerTransport {
    HangUp(tarpc::serde_transport::new(framed(stream), ServerCodec::default()))
}

fn framed(stream: UnixStream) -> Framed<UnixStream, LengthDelimitedCodec> {
    let codec = LengthDelimitedCodec::builder()
        .little_endian()
        .length_field_type::<u32>()
        .max_frame_length(FRAME_BYTES_MAX)
        .new_codec();
    Framed::with_capacity(stream, codec, BUFFER_BYTES)
}

/// Encodes answers and decodes requests, with deadlines shortened to [`DEADLINE_MAX`].
#[derive(Debug)]
pub struct ServerCodec<Req, Resp>(PhantomData<fn(Req) -> Resp>);

impl<Req, Resp> Default for ServerCodec<Req, Resp> {
    fn default() -> Self {
        ServerCodec(PhantomData)
    }
}

/// The shape of [`ClientMessage`] on the wire, with the deadline as the duration that travels.
#[derive(Serialize, Deserialize)]
enum WireMessage<T> {
    Request(WireRequest<T>),
    Cancel { trace_context: trace::Context, request_id: u64 },
}

#[derive(Serialize, Deserialize)]
struct WireRequest<T> {
    context: WireContext,
    id: u64,
    message: T,
}

#[derive(Serialize, Deserialize)]
struct WireContext {
    deadline: Duration,
    trace_context: trace::Context,
}

impl<Req, Resp> Deserializer<ClientMessage<Req>> for ServerCodec<Req, Resp>
where
    Req: for<'de> Deserialize<'de>,
{
    type Error = io::Error;

    fn deserialize(self: Pin<&mut Self>, frame: &BytesMut) -> io::Result<ClientMessage<Req>> {
        let bincode = std::pin::pin!(Bincode::<WireMessage<Req>, ()>::default());
        let message = bincode.deserialize(frame)?;
        Ok(match message {
            WireMessage::Request(WireRequest { context: wire, id, message }) => {
                let mut context = context::Context::current();
                context.deadline = Instant::now() + wire.deadline.min(DEADLINE_MAX);
                context.trace_context = wire.trace_context;
                ClientMessage::Request(Request { context, id, message })
            }
            WireMessage::Cancel { trace_context, request_id } => {
                ClientMessage::Cancel { trace_context, request_id }
            }
        })
    }
}

impl<Req, Resp> Serializer<Response<Resp>> for ServerCodec<Req, Resp>
where
    Resp: Serialize,
{
    type Error = io::Error;

    fn serialize(self: Pin<&mut Self>, answer: &Response<Resp>) -> io::Result<Bytes> {
        let bincode = std::pin::pin!(Bincode::<(), Response<Resp>>::default());
        bincode.serialize(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(frame: &[u8]) -> io::Result<ClientMessage<u32>> {
        let mut codec = ServerCodec::<u32, u32>::default();
        Pin::new(&mut codec).deserialize(&BytesMut::from(frame))
    }

    #[test]
    fn requests_decode_as_tarpc_encodes_them() {
        let mut tarpc = Bincode::<(), ClientMessage<u32>>::default();
        let mut context = context::Context::current();
        context.deadline = Instant::now() + Duration::from_secs(5);
        let sent = ClientMessage::Request(Request { context, id: 8, message: 9 });
        let frame = Pin::new(&mut tarpc).serialize(&sent).unwrap();
        let ClientMessage::Request(got) = decode(&frame).unwrap() else { panic!("not a request") };
        assert_eq!((got.id, got.message), (8, 9));
        let left = got.context.deadline - Instant::now();
        assert!(left > Duration::from_secs(4) && left <= Duration::from_secs(5));
        let cancel: ClientMessage<u32> =
            ClientMessage::Cancel { trace_context: context.trace_context, request_id: 8 };
        let frame = Pin::new(&mut tarpc).serialize(&cancel).unwrap();
        assert!(matches!(decode(&frame), Ok(ClientMessage::Cancel { request_id: 8, .. })));
    }

    #[test]
    fn a_deadline_of_centuries_is_shortened() {
        for deadline in [Duration::MAX, Duration::from_secs(3 * 365 * 86_400)] {
            let context = WireContext { deadline, trace_context: trace::Context::default() };
            let wire = WireMessage::Request(WireRequest { context, id: 1, message: 2u32 });
            let mut bincode = Bincode::<(), WireMessage<u32>>::default();
            let frame = Pin::new(&mut bincode).serialize(&wire).unwrap();
            let ClientMessage::Request(got) = decode(&frame).unwrap() else { panic!() };
            assert!(got.context.deadline <= Instant::now() + DEADLINE_MAX);
        }
    }

    #[test]
    fn garbage_is_an_error_and_allocates_nothing_large() {
        let mut state = 1u64;
        for len in 0..300 {
            let bytes: Vec<u8> = (0..len)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 56) as u8
                })
                .collect();
            let mut codec = ServerCodec::<KvtideRequest, KvtideResponse>::default();
            let _ = Pin::new(&mut codec).deserialize(&BytesMut::from(&bytes[..]));
        }
        // An enum's number, then a byte string that claims 2^60 bytes.
        let huge = [0u8, 253, 0, 0, 0, 0, 0, 0, 0, 16];
        assert!(decode(&huge).is_err());
    }
}
