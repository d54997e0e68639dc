//! A subscriber of the daemon's events: as much of ZeroMQ and MessagePack as they need, written
//! apart from what the daemon sends them with.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// A value of MessagePack.
#[derive(Clone, PartialEq, Debug)]
pub enum Value {
    /// Nothing.
    Nil,
    /// A whole number.
    Number(u64),
    /// A number of seconds.
    Seconds(f64),
    /// A text.
    Text(String),
    /// A list.
    List(Vec<Value>),
    /// Values by name.
    Map(Vec<(String, Value)>),
}

impl Value {
    /// The value of this name in a map.
    pub fn get(&self, name: &str) -> Option<&Value> {
        match self {
            Value::Map(fields) => {
                fields.iter().find(|(field, _)| field == name).map(|(_, value)| value)
            }
            _ => None,
        }
    }

    /// The elements of a list; none of anything else.
    pub fn list(&self) -> &[Value] {
        match self {
            Value::List(values) => values,
            _ => &[],
        }
    }

    /// The text, if it is one.
    pub fn text(&self) -> Option<&str> {
        match self {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }
}

/// A message.
#[derive(Clone, PartialEq, Debug)]
pub struct Message {
    /// Its topic.
    pub topic: String,
    /// Its number within the topic.
    pub number: u64,
    /// What it says.
    pub batch: Value,
}

/// A subscriber of all topics that begin with something.
pub struct Subscriber(TcpStream);

impl Subscriber {
    /// Connects and subscribes.
    ///
    /// # Errors
    /// Nobody listens, or it is no publisher.
    pub fn connect(address: SocketAddr, topic: &str) -> io::Result<Subscriber> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        let mut greeting = [0; 64];
        for (at, byte) in [(0, 0xff), (9, 0x7f), (10, 3)] {
            if let Some(place) = greeting.get_mut(at) {
                *place = byte;
            }
        }
        for (place, byte) in greeting.iter_mut().skip(12).zip(b"NULL") {
            *place = *byte;
        }
        stream.write_all(&greeting)?;
        stream.read_exact(&mut greeting)?;
        let ready = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB";
        stream.write_all(ready)?;
        let mut subscriber = Subscriber(stream);
        let (_, hello) = subscriber.frame()?;
        if !hello.ends_with(b"\x03PUB") {
            return Err(io::Error::other("it is no publisher"));
        }
        let mut subscribe = vec![0, u8::try_from(topic.len() + 1).unwrap_or(u8::MAX), 1];
        subscribe.extend(topic.as_bytes());
        subscriber.0.write_all(&subscribe)?;
        Ok(subscriber)
    }

    fn frame(&mut self) -> io::Result<(u8, Vec<u8>)> {
        let mut head = [0; 2];
        self.0.read_exact(&mut head)?;
        let [flags, short] = head;
        let mut bytes = u64::from(short);
        if flags & 2 != 0 {
            let mut rest = [0; 7];
            self.0.read_exact(&mut rest)?;
            bytes = rest.iter().fold(bytes, |bytes, byte| bytes << 8 | u64::from(*byte));
        }
        let mut body = vec![0; usize::try_from(bytes).map_err(io::Error::other)?];
        self.0.read_exact(&mut body)?;
        Ok((flags, body))
    }

    /// The next message, within half a minute.
    ///
    /// # Errors
    /// There is none, or it is not as it should be.
    pub fn receive(&mut self) -> io::Result<Message> {
        let wrong = || io::Error::other("a message of another shape");
        let (more, topic) = self.frame()?;
        let (again, number) = self.frame()?;
        let (last, batch) = self.frame()?;
        if (more & 1, again & 1, last & 1) != (1, 1, 0) {
            return Err(wrong());
        }
        let mut rest = batch.as_slice();
        let batch = value(&mut rest).filter(|_| rest.is_empty()).ok_or_else(wrong)?;
        Ok(Message {
            topic: String::from_utf8(topic).map_err(io::Error::other)?,
            number: u64::from_be_bytes(number.try_into().map_err(|_| wrong())?),
            batch,
        })
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (taken, left) = rest.split_first_chunk::<N>()?;
    *rest = left;
    Some(*taken)
}

fn value(rest: &mut &[u8]) -> Option<Value> {
    let [kind] = take::<1>(rest)?;
    Some(match kind {
        0..=0x7f => Value::Number(kind.into()),
        0x80..=0x8f => map(rest, u32::from(kind & 15))?,
        0x90..=0x9f => list(rest, u32::from(kind & 15))?,
        0xa0..=0xbf => text(rest, u32::from(kind & 31))?,
        0xc0 => Value::Nil,
        0xcb => Value::Seconds(f64::from_be_bytes(take(rest)?)),
        0xcc => Value::Number(u8::from_be_bytes(take(rest)?).into()),
        0xcd => Value::Number(u16::from_be_bytes(take(rest)?).into()),
        0xce => Value::Number(u32::from_be_bytes(take(rest)?).into()),
        0xcf => Value::Number(u64::from_be_bytes(take(rest)?)),
        0xd9 => {
            let bytes = u8::from_be_bytes(take(rest)?);
            text(rest, bytes.into())?
        }
        0xdc => {
            let count = u16::from_be_bytes(take(rest)?);
            list(rest, count.into())?
        }
        0xdd => {
            let count = u32::from_be_bytes(take(rest)?);
            list(rest, count)?
        }
        _ => return None,
    })
}

fn text(rest: &mut &[u8], bytes: u32) -> Option<Value> {
    let (text, left) = rest.split_at_checked(usize::try_from(bytes).ok()?)?;
    *rest = left;
    Some(Value::Text(String::from_utf8(text.to_vec()).ok()?))
}

fn list(rest: &mut &[u8], count: u32) -> Option<Value> {
    (0..count).map(|_| value(rest)).collect::<Option<Vec<_>>>().map(Value::List)
}

fn map(rest: &mut &[u8], count: u32) -> Option<Value> {
    let field = |rest: &mut &[u8]| match (value(rest)?, value(rest)?) {
        (Value::Text(name), value) => Some((name, value)),
        _ => None,
    };
    (0..count).map(|_| field(rest)).collect::<Option<Vec<_>>>().map(Value::Map)
}
