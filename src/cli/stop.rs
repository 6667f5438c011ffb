//! Ctrl-C and the wish of the system that the process ends: long work finishes the step in hand.

use std::sync::atomic::{AtomicI32, Ordering};

/// The signal that was caught; 0 before.
static ASKED: AtomicI32 = AtomicI32::new(0);

/// From now on the first interruption only notes its signal. The second one ends the process as usual.
pub(super) fn catch() {
    #[cfg(unix)]
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler does only what a handler may: it sets a number, and gives the signal its usual effect again.
        unsafe { libc::signal(signal, ask as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    }
}

#[cfg(unix)]
extern "C" fn ask(signal: libc::c_int) {
    ASKED.store(signal, Ordering::Relaxed);
    // SAFETY: `signal` may be called by a handler.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

/// True once an interruption was caught.
pub(super) fn is_asked() -> bool {
    ASKED.load(Ordering::Relaxed) != 0
}

/// The exit code of a process that the caught signal has ended, as shells have it: 130 of Ctrl-C.
pub(super) fn exit_code() -> u8 {
    ASKED.load(Ordering::Relaxed).try_into().map_or(u8::MAX, |signal: u8| signal.saturating_add(128))
}
