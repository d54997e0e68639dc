//! What every call does first: faults, the current context, errors that stay.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::device::{self, Device};
use crate::fault::{self, Fault};

pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const OUT_OF_MEMORY: u32 = 2;
pub(crate) const NOT_INITIALIZED: u32 = 3;
pub(crate) const NO_DEVICE: u32 = 100;
pub(crate) const INVALID_DEVICE: u32 = 101;
pub(crate) const INVALID_IMAGE: u32 = 200;
pub(crate) const INVALID_CONTEXT: u32 = 201;
pub(crate) const MAP_FAILED: u32 = 205;
pub(crate) const NO_BINARY_FOR_GPU: u32 = 209;
pub(crate) const UNSUPPORTED_PTX_VERSION: u32 = 222;
pub(crate) const OPERATING_SYSTEM: u32 = 304;
pub(crate) const INVALID_HANDLE: u32 = 400;
pub(crate) const NOT_FOUND: u32 = 500;
pub(crate) const NOT_READY: u32 = 600;
pub(crate) const ILLEGAL_ADDRESS: u32 = 700;
pub(crate) const CONTEXT_IS_DESTROYED: u32 = 709;
pub(crate) const HOST_MEMORY_ALREADY_REGISTERED: u32 = 712;
pub(crate) const HOST_MEMORY_NOT_REGISTERED: u32 = 713;

/// What a call needs before it does anything.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    /// Nothing: allowed before `cuInit`.
    Nothing,
    /// `cuInit`.
    Init,
    /// `cuInit`, and that no error stays on the current context, if there is one.
    NoError,
    /// A current context, without an error that stays.
    Context,
    /// As `Context`; the call queues work, in which a fault that stays shows later.
    Stream,
}

/// A call under way.
pub(crate) struct Call {
    device: Option<&'static Device>,
    /// What is to happen to the work that this call queues: a code that stays, or a stall.
    pub(crate) fault: Option<Fault>,
}

impl Call {
    /// The device of the current context, which `Needs::Context` checked.
    pub(crate) fn device(&self) -> Result<&'static Device, u32> {
        self.device.ok_or(INVALID_CONTEXT)
    }
}

static INITIALIZED: AtomicBool = AtomicBool::new(false);

/// The error that stays on a context: 0 for none.
#[derive(Default)]
pub(crate) struct Sticky(AtomicU32);

impl Sticky {
    /// Sets it unless one is there already.
    pub(crate) fn set(&self, code: u32) {
        let _ = self.0.compare_exchange(0, code, Ordering::SeqCst, Ordering::SeqCst);
    }

    pub(crate) fn check(&self) -> Result<(), u32> {
        match self.0.load(Ordering::SeqCst) {
            0 => Ok(()),
            code => Err(code),
        }
    }
}

/// Whether an error stays on the context that it happened in.
pub(crate) fn is_sticky(code: u32) -> bool {
    matches!(code, 4 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721)
}

pub(crate) fn initialize() {
    INITIALIZED.store(true, Ordering::SeqCst);
}

thread_local! {
    /// The contexts of this thread, the current one last. 0 is none.
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The current context of this thread; 0 is none.
pub(crate) fn current() -> usize {
    CURRENT.with_borrow(|stack| stack.last().copied().unwrap_or(0))
}

pub(crate) fn set_current(context: usize) {
    CURRENT.with_borrow_mut(|stack| {
        stack.pop();
        if context != 0 {
            stack.push(context);
        }
    });
}

pub(crate) fn push_current(context: usize) {
    CURRENT.with_borrow_mut(|stack| stack.push(context));
}

pub(crate) fn pop_current() -> Option<usize> {
    CURRENT.with_borrow_mut(Vec::pop)
}

/// Runs the call `name`.
pub(crate) fn call(
    name: &'static str,
    needs: Needs,
    run: impl FnOnce(&Call) -> Result<(), u32>,
) -> u32 {
    match begin(name, needs).and_then(|call| run(&call)) {
        Ok(()) => 0,
        Err(code) => code,
    }
}

fn begin(name: &'static str, needs: Needs) -> Result<Call, u32> {
    let fault = match fault::next(name) {
        Some(Fault::Stall(source)) if needs != Needs::Stream => Some(Fault::Hang(source)),
        other => other,
    };
    let fault = match fault {
        Some(Fault::Hang(source)) => {
            fault::hang(source);
            None
        }
        other => other,
    };
    if needs == Needs::Nothing {
        return match fault {
            Some(Fault::Code(code)) => Err(code),
            _ => Ok(Call { device: None, fault: None }),
        };
    }
    if !INITIALIZED.load(Ordering::SeqCst) {
        return Err(NOT_INITIALIZED);
    }
    let device = match (current(), needs) {
        (0, Needs::Context | Needs::Stream) => return Err(INVALID_CONTEXT),
        (0, _) => None,
        (context, _) => Some(device::of_context(context)?),
    };
    if needs != Needs::Init
        && let Some(device) = device
    {
        device.sticky.check()?;
    }
    match fault {
        Some(Fault::Code(code)) if needs != Needs::Stream || !is_sticky(code) => {
            if let Some(device) = device.filter(|_| is_sticky(code)) {
                device.sticky.set(code);
            }
            Err(code)
        }
        fault => Ok(Call { device, fault }),
    }
}
