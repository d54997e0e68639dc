//! Prefills: reported, so that the daemon knows whether a load is worth it, and asked for, so that
//! not everybody computes at once.

use std::time::Duration;

use kvtide_tiers::block::BlockKey;
use kvtide_tiers::catalog::{GrantId, PrefillAnswer, PrefillAsk, PrefillReport};

use super::{Client, namespace_on};
use crate::error::ClientError;
use crate::handles::NamespaceHandle;
use crate::protocol::CallError;

/// How long to wait before a busy daemon is asked again.
const BUSY_WAIT: Duration = Duration::from_millis(10);

/// A prefill that is wanted.
#[derive(Clone, Copy, Debug)]
pub struct Prefill<'a> {
    /// The namespace.
    pub namespace: &'a NamespaceHandle,
    /// Tokens to compute.
    pub tokens: u32,
    /// Tokens before them whose KV is there.
    pub context: u32,
    /// The caller's number of the conversation, 0 for none. It, and `last`, say which ask this is
    /// when it is asked again.
    pub conversation: u64,
    /// Turns of the conversation that these tokens are; `None` when none can be left out.
    pub turns: Option<u32>,
    /// The last block that will be computed, if there is a full one: who wants the same waits for
    /// the first to store it.
    pub last: Option<BlockKey>,
}

/// Whether a prefill may begin.
#[derive(Debug)]
pub enum Admission {
    /// Now. Give the grant back by [`Client::report_prefill`] or [`Client::prefill_done`]; `None`
    /// where prefills are not rationed, and when the daemon does not answer.
    Admitted(Option<Grant>),
    /// Not yet: look up and ask again after so long.
    Wait(Duration),
    /// It would wait too long: compute the last turns only, so many; or ask again with no number of
    /// turns.
    Degrade {
        /// How many, at least 1.
        keep_turns: u32,
    },
}

/// A prefill that was admitted, and counts as under way. It ends by itself after a while, and with
/// the connection.
#[derive(Debug)]
pub struct Grant {
    id: GrantId,
    generation: u64,
}

impl Client {
    /// Tells the daemon how long a prefill took: so many tokens in one go, after so many whose KV
    /// was there. Ends its grant. Lookups then say what to load and what to compute
    /// ([`crate::Hit::advice`]). At best costs a call; a daemon that is gone is told nothing.
    pub async fn report_prefill(
        &self,
        namespace: &NamespaceHandle,
        tokens: u32,
        context: u32,
        took: Duration,
        grant: Option<Grant>,
    ) {
        let told = async {
            let link = self.shared().gate()?;
            let current = grant.filter(|grant| grant.generation == link.generation);
            let report = PrefillReport {
                namespace: namespace_on(&link, namespace)?,
                tokens,
                context,
                took_us: u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
                grant: current.map(|grant| grant.id),
            };
            let ask = |stub: crate::protocol::KvtideClient, context| async move {
                stub.report_prefill(context, report).await
            };
            Ok::<bool, ClientError>(self.shared().call(&link, self.limit(), ask).await??)
        };
        if let Err(error) = told.await {
            tracing::debug!(%error, "a prefill was not reported");
        }
    }

    /// Asks whether a prefill may begin. With the daemon gone, slow or refusing it may: the engine
    /// never waits for a sick daemon.
    pub async fn admit_prefill(&self, wanted: &Prefill<'_>) -> Admission {
        let asked = async {
            let link = self.shared().gate()?;
            let namespace = namespace_on(&link, wanted.namespace)?;
            let ask = PrefillAsk {
                tokens: wanted.tokens,
                context: wanted.context,
                conversation: wanted.conversation,
                turns: wanted.turns,
                prefix: wanted.last.map(|last| (namespace, last)),
            };
            let call = |stub: crate::protocol::KvtideClient, context| async move {
                stub.admit_prefill(context, ask).await
            };
            let answer = self.shared().call(&link, self.limit(), call).await??;
            Ok::<_, ClientError>((answer, link.generation))
        };
        match asked.await {
            Ok((PrefillAnswer::Admit { grant }, generation)) => {
                Admission::Admitted(grant.map(|id| Grant { id, generation }))
            }
            Ok((PrefillAnswer::Wait { ms, .. }, _)) => {
                Admission::Wait(Duration::from_millis(ms.into()))
            }
            Ok((PrefillAnswer::Degrade { keep_turns }, _)) => Admission::Degrade { keep_turns },
            Err(ClientError::Call(CallError::Busy(_))) => Admission::Wait(BUSY_WAIT),
            Err(error) => {
                tracing::debug!(%error, "a prefill could not be asked for; taken as admitted");
                Admission::Admitted(None)
            }
        }
    }

    /// Gives a grant back whose prefill is not reported: it failed, or will not be done.
    ///
    /// # Errors
    /// See [`ClientError`]; the grant then ends by itself.
    pub async fn prefill_done(&self, grant: Grant) -> Result<(), ClientError> {
        let link = self.shared().gate()?;
        if link.generation == grant.generation {
            let ask = |stub: crate::protocol::KvtideClient, context| async move {
                stub.prefill_done(context, grant.id).await
            };
            self.shared().call(&link, self.limit(), ask).await??;
        }
        Ok(())
    }
}
