//! Work on several threads, whose results do not depend on how many there are.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Does some work per item, on as many threads as there are cores. The results have the order of the items.
pub fn each<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let run = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            match items.get(at) {
                Some(item) => done.push((at, work(item))),
                None => return done,
            }
        }
    };
    let others = thread::available_parallelism().map_or(1, usize::from).min(items.len()).saturating_sub(1);
    let mut done = thread::scope(|scope| {
        // If the system gives no more threads, fewer do the same.
        let others = (0..others).map_while(|_| thread::Builder::new().spawn_scoped(scope, run).ok());
        let others: Vec<_> = others.collect();
        let mut done = run();
        for other in others {
            done.extend(other.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        done
    });
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_have_the_order_of_the_items() {
        let items: Vec<usize> = (0..1000).collect();
        assert_eq!(each(&items, |item| item * 2), items.iter().map(|item| item * 2).collect::<Vec<_>>());
        assert!(each(&[] as &[usize], |item| *item).is_empty());
    }
}
