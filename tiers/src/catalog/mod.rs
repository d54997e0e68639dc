//! What is asked of a node's cache, and the pure core that decides.
//!
//! Without the feature `store` only the words of requests and answers are built, for clients.

mod advice;
#[cfg(feature = "store")]
mod core;
mod hints;
mod ladder;
mod quota;
mod request;

pub use advice::*;

#[cfg(feature = "store")]
pub use self::core::*;
pub use ladder::*;
pub use quota::*;
pub use request::*;
