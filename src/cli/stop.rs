//! Ctrl-C and the wish of the system that the process ends: long work finishes the step in hand.

use std::sync::atomic::{AtomicBool, Ordering};

static ASKED: AtomicBool = AtomicBool::new(false);

/// From now on the first interruption only sets a flag. The second one ends the process as usual.
pub(super) fn catch() {
    #[cfg(unix)]
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler does only what a handler may: it sets a flag, and gives the signal its usual effect again.
        unsafe { libc::signal(signal, ask as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    }
}

#[cfg(unix)]
extern "C" fn ask(signal: libc::c_int) {
    ASKED.store(true, Ordering::Relaxed);
    // SAFETY: `signal` may be called by a handler.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

/// True once an interruption was caught.
pub(super) fn is_asked() -> bool {
    ASKED.load(Ordering::Relaxed)
}
