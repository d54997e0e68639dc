//! Prefills: what clients report of them, and whether they may begin.

use kvtide_client::protocol::CallError;
use kvtide_tiers::catalog::{PrefillAnswer, PrefillAsk, PrefillReport, Reply, Request};

use super::{Service, odd_reply};

impl Service {
    pub(super) async fn do_report_prefill(&self, report: PrefillReport) -> Result<bool, CallError> {
        self.opened(report.namespace)?;
        Ok(self.count(Request::ReportPrefill(report)).await? > 0)
    }

    pub(super) async fn do_admit_prefill(
        &self,
        ask: PrefillAsk,
    ) -> Result<PrefillAnswer, CallError> {
        if let Some((namespace, _)) = ask.prefix {
            self.opened(namespace)?;
        }
        match self.ask(Request::AdmitPrefill(ask)).await? {
            Reply::Prefill(answer) => Ok(answer),
            _ => Err(odd_reply()),
        }
    }
}
