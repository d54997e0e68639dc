//! The first message on a connection, in both directions: fixed-size binary headers, read with
//! `recvmsg` so that file descriptors sent along are kept.
//!
//! ```text
//! hello  (104 bytes)  magic 8 | version u16 | kind u8 | name length u8 | 0 u32 | session u64
//!                     | token 16 | name 64                       kind: 0 session, 1 attach
//! answer  (80 bytes)  magic 8 | version u16 | code u16 | text length u16 | 0 u16 | session u64
//!                     | token 16 | fd number u64 | limits 6 x u32 | 0 u64, then the text
//! ```
//! Numbers are little-endian. The sizes stay the same in every version, so that both sides can name
//! a version they do not speak. A session's answer carries the reading end of a pipe
//! that becomes readable when tickets end.
//! An attach hello carries the descriptor to attach, and its answer the number under which the
//! session finds it. The token keeps one client from attaching to another's session.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use tokio::io::Interest;
use tokio::net::UnixStream;

use crate::protocol::PROTOCOL_VERSION;

const MAGIC: [u8; 8] = *b"kvtide\r\n";

/// Bytes of a hello.
pub const HELLO_BYTES: usize = 104;

/// Bytes of the fixed part of the answer.
pub const ANSWER_BYTES: usize = 80;

/// Longest client name, bytes; longer ones are cut.
pub const NAME_BYTES_MAX: usize = 64;

const TEXT_BYTES_MAX: usize = 1024;

/// What a connection is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HelloKind {
    /// A new session.
    Session,
    /// Hands one file descriptor to a session that exists.
    Attach {
        /// The session.
        session: u64,
        /// The token that its hello was answered with.
        token: [u8; 16],
    },
}

/// The first message of a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hello {
    /// The version that the client speaks.
    pub version: u16,
    /// What the connection is for.
    pub kind: HelloKind,
    /// What the client calls itself, for logs.
    pub name: String,
}

impl Hello {
    /// A hello of this library's version.
    pub fn new(kind: HelloKind, name: &str) -> Hello {
        Hello { version: PROTOCOL_VERSION, kind, name: name.to_owned() }
    }
}

/// Why a hello is refused. The numbers travel, and keep their meaning in all versions.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
#[repr(u16)]
pub enum HelloRefusal {
    /// The versions differ.
    Version = 1,
    /// The configuration maps the user to no tenant.
    UnknownUser = 2,
    /// All sessions are taken.
    TooManySessions = 3,
    /// No such session, or the wrong token.
    UnknownSession = 4,
    /// The session has too many descriptors that no region uses yet.
    TooManyDescriptors = 5,
    /// An attach without a descriptor, or a session hello with one.
    Descriptors = 6,
    /// Not a hello.
    Malformed = 7,
    /// The daemon is stopping.
    Stopping = 8,
    /// A reason that this version does not know.
    Other = u16::MAX,
}

impl HelloRefusal {
    fn from_code(code: u16) -> HelloRefusal {
        match code {
            1 => HelloRefusal::Version,
            2 => HelloRefusal::UnknownUser,
            3 => HelloRefusal::TooManySessions,
            4 => HelloRefusal::UnknownSession,
            5 => HelloRefusal::TooManyDescriptors,
            6 => HelloRefusal::Descriptors,
            7 => HelloRefusal::Malformed,
            8 => HelloRefusal::Stopping,
            _ => HelloRefusal::Other,
        }
    }

    /// The reason as a metric's label.
    pub fn label(self) -> &'static str {
        match self {
            HelloRefusal::Version => "version",
            HelloRefusal::UnknownUser => "unknown_user",
            HelloRefusal::TooManySessions => "too_many_sessions",
            HelloRefusal::UnknownSession => "unknown_session",
            HelloRefusal::TooManyDescriptors => "too_many_descriptors",
            HelloRefusal::Descriptors => "descriptors",
            HelloRefusal::Malformed => "malformed",
            HelloRefusal::Stopping => "stopping",
            HelloRefusal::Other => "other",
        }
    }
}

/// Limits that a client has to keep, stated by the daemon in its answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SessionLimits {
    /// Bytes of the largest frame.
    pub frame_bytes: u32,
    /// Keys in one call.
    pub keys_per_call: u32,
    /// Calls in flight on one connection.
    pub calls_in_flight: u32,
    /// Longest lease, milliseconds.
    pub lease_ms_max: u32,
    /// Tickets that have not been waited for.
    pub tickets: u32,
    /// Regions.
    pub regions: u32,
}

/// The daemon's yes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Welcome {
    /// The session.
    pub session: u64,
    /// The token for attach connections.
    pub token: [u8; 16],
    /// The number of the attached descriptor (0 in the answer to a session hello).
    pub fd: u64,
    /// Limits.
    pub limits: SessionLimits,
}

/// The daemon's answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    /// Yes.
    Welcome(Welcome),
    /// No, with a sentence for people.
    Refused {
        /// The version that the daemon speaks.
        version: u16,
        /// Why.
        reason: HelloRefusal,
        /// The sentence.
        message: String,
    },
}

/// Sends a hello, with a descriptor for an attach.
///
/// # Errors
/// What the socket reports.
pub async fn send_hello(
    stream: &UnixStream,
    hello: &Hello,
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    send(stream, &encode_hello(hello), fd).await
}

/// Receives a hello and the descriptors sent with it, at most one.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] for what is not a hello, or else what the socket reports.
pub async fn recv_hello(stream: &UnixStream) -> io::Result<(Hello, Option<OwnedFd>)> {
    let mut bytes = [0; HELLO_BYTES];
    let mut fd = None;
    recv(stream, &mut bytes, &mut fd).await?;
    let hello = decode_hello(&bytes)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "not a hello of kvtide"))?;
    Ok((hello, fd))
}

/// Sends the daemon's answer, with the pipe's end for a session.
///
/// # Errors
/// What the socket reports.
pub async fn send_answer(
    stream: &UnixStream,
    answer: &Answer,
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    send(stream, &encode_answer(answer), fd).await
}

/// Receives the daemon's answer and the descriptor sent with it.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] for what is not an answer, or else what the socket reports.
pub async fn recv_answer(stream: &UnixStream) -> io::Result<(Answer, Option<OwnedFd>)> {
    let mut head = [0; ANSWER_BYTES];
    let mut fd = None;
    recv(stream, &mut head, &mut fd).await?;
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, "not an answer of kvtide");
    let mut fields = Fields(&head);
    if fields.take::<8>() != MAGIC {
        return Err(invalid());
    }
    let (version, code, text) = (fields.u16(), fields.u16(), usize::from(fields.u16()));
    fields.u16();
    if text > TEXT_BYTES_MAX {
        return Err(invalid());
    }
    if code == 0 && version == PROTOCOL_VERSION {
        let (session, token, number) = (fields.u64(), fields.take(), fields.u64());
        let limits = SessionLimits {
            frame_bytes: fields.u32(),
            keys_per_call: fields.u32(),
            calls_in_flight: fields.u32(),
            lease_ms_max: fields.u32(),
            tickets: fields.u32(),
            regions: fields.u32(),
        };
        return Ok((Answer::Welcome(Welcome { session, token, fd: number, limits }), fd));
    }
    let mut message = vec![0; text];
    recv(stream, &mut message, &mut fd).await?;
    let message = String::from_utf8_lossy(&message).into_owned();
    Ok((Answer::Refused { version, reason: HelloRefusal::from_code(code), message }, None))
}

/// The bytes of a hello.
pub fn encode_hello(hello: &Hello) -> [u8; HELLO_BYTES] {
    let mut out = Vec::with_capacity(HELLO_BYTES);
    let (kind, session, token) = match hello.kind {
        HelloKind::Session => (0, 0, [0; 16]),
        HelloKind::Attach { session, token } => (1, session, token),
    };
    let name = cut(&hello.name, NAME_BYTES_MAX);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&hello.version.to_le_bytes());
    out.extend_from_slice(&[kind, u8::try_from(name.len()).unwrap_or(0)]);
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&session.to_le_bytes());
    out.extend_from_slice(&token);
    out.extend_from_slice(name.as_bytes());
    out.resize(HELLO_BYTES, 0);
    out.try_into().expect("the hello was resized to its fixed size")
}

/// Reads the bytes of a hello; `None` for anything else.
pub fn decode_hello(bytes: &[u8; HELLO_BYTES]) -> Option<Hello> {
    let mut fields = Fields(bytes);
    if fields.take::<8>() != MAGIC {
        return None;
    }
    let version = fields.u16();
    let [kind, name_len] = fields.take();
    fields.u32();
    let (session, token) = (fields.u64(), fields.take());
    let kind = match kind {
        0 => HelloKind::Session,
        1 => HelloKind::Attach { session, token },
        _ => return None,
    };
    let name = std::str::from_utf8(fields.0.get(..usize::from(name_len))?).ok()?;
    Some(Hello { version, kind, name: name.chars().filter(|c| !c.is_control()).collect() })
}

/// The bytes of an answer.
pub fn encode_answer(answer: &Answer) -> Vec<u8> {
    let mut out = Vec::with_capacity(ANSWER_BYTES);
    out.extend_from_slice(&MAGIC);
    match answer {
        Answer::Welcome(welcome) => {
            out.extend_from_slice(&PROTOCOL_VERSION.to_le_bytes());
            out.extend_from_slice(&[0; 6]);
            out.extend_from_slice(&welcome.session.to_le_bytes());
            out.extend_from_slice(&welcome.token);
            out.extend_from_slice(&welcome.fd.to_le_bytes());
            let limits = &welcome.limits;
            for limit in [
                limits.frame_bytes,
                limits.keys_per_call,
                limits.calls_in_flight,
                limits.lease_ms_max,
                limits.tickets,
                limits.regions,
            ] {
                out.extend_from_slice(&limit.to_le_bytes());
            }
            out.resize(ANSWER_BYTES, 0);
        }
        Answer::Refused { version, reason, message } => {
            let text = cut(message, TEXT_BYTES_MAX);
            out.extend_from_slice(&version.to_le_bytes());
            out.extend_from_slice(&(*reason as u16).to_le_bytes());
            out.extend_from_slice(&u16::try_from(text.len()).unwrap_or(0).to_le_bytes());
            out.resize(ANSWER_BYTES, 0);
            out.extend_from_slice(text.as_bytes());
        }
    }
    out
}

/// The longest start of `text` that has at most `bytes` bytes.
fn cut(text: &str, bytes: usize) -> &str {
    text.get(..text.floor_char_boundary(bytes)).unwrap_or(text)
}

async fn send(stream: &UnixStream, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut sent = 0;
    while let Some(rest) = bytes.get(sent..).filter(|rest| !rest.is_empty()) {
        let fds: &[BorrowedFd<'_>] = if sent == 0 { fd.as_slice() } else { &[] };
        sent += stream
            .async_io(Interest::WRITABLE, || {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
                    return Err(io::Error::other("no room for the descriptor"));
                }
                let parts = [IoSlice::new(rest)];
                let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
                Ok(rustix::net::sendmsg(stream.as_fd(), &parts, &mut control, flags)?)
            })
            .await?;
    }
    Ok(())
}

/// Fills `bytes`, and keeps the first descriptor that comes along; further ones are closed.
async fn recv(stream: &UnixStream, bytes: &mut [u8], fd: &mut Option<OwnedFd>) -> io::Result<()> {
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        let count = stream
            .async_io(Interest::READABLE, || {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = RecvAncillaryBuffer::new(&mut space);
                let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
                let mut parts = [IoSliceMut::new(rest)];
                let got = rustix::net::recvmsg(stream.as_fd(), &mut parts, &mut control, flags)?;
                for message in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(fds) = message {
                        fds.for_each(|each| *fd = fd.take().or(Some(each)));
                    }
                }
                Ok(got.bytes)
            })
            .await?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        filled += count;
    }
    Ok(())
}

struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (head, rest) = self.0.split_first_chunk().expect("headers have all of their fields");
        self.0 = rest;
        *head
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hello_round_trips_and_odd_bytes_are_refused() {
        let kind = HelloKind::Attach { session: 7, token: [9; 16] };
        let hello = Hello::new(kind, "engine 1");
        let bytes = encode_hello(&hello);
        assert_eq!(decode_hello(&bytes), Some(hello));
        for (at, value) in [(0, b'x'), (10, 2), (11, 65), (11, 255)] {
            let mut bad = bytes;
            bad[at] = value;
            assert_eq!(decode_hello(&bad), None, "byte {at}");
        }
        let long = Hello::new(HelloKind::Session, &"é".repeat(100));
        let cut = decode_hello(&encode_hello(&long)).expect("a long name is cut");
        assert_eq!(cut.name.len(), NAME_BYTES_MAX);
    }

    #[tokio::test]
    async fn answers_and_descriptors_cross_the_socket() {
        let (left, right) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        let hello = Hello::new(HelloKind::Session, "a");
        send_hello(&left, &hello, Some(file.as_fd())).await.unwrap();
        let (got, fd) = recv_hello(&right).await.unwrap();
        assert_eq!(got, hello);
        assert!(fd.is_some());
        let limits = SessionLimits { keys_per_call: 5, regions: 6, ..SessionLimits::default() };
        let welcome = Answer::Welcome(Welcome { session: 3, token: [4; 16], fd: 5, limits });
        send_answer(&right, &welcome, Some(file.as_fd())).await.unwrap();
        let (answer, fd) = recv_answer(&left).await.unwrap();
        assert_eq!(answer, welcome);
        assert!(fd.is_some());
        let refused =
            Answer::Refused { version: 9, reason: HelloRefusal::UnknownUser, message: "no".into() };
        send_answer(&right, &refused, None).await.unwrap();
        assert_eq!(recv_answer(&left).await.unwrap().0, refused);
    }
}
