//! Memory that the host program lends: where segments lie in it, and that nobody lends it twice.

use std::sync::{Mutex, PoisonError};

/// The memory that is lent now: its address space, its first address and its end.
static LENT: Mutex<Vec<(&'static str, u64, u64)>> = Mutex::new(Vec::new());

/// A range of addresses that the host program lends. It can be lent again once this is dropped.
#[derive(Debug)]
pub struct Lent {
    space: &'static str,
    base: u64,
    bytes: u64,
}

impl Lent {
    /// Notes a range of an address space.
    ///
    /// # Errors
    /// When it does not begin at a multiple of `alignment`, ends beyond all addresses, or overlaps memory that is lent.
    pub fn new(space: &'static str, base: u64, bytes: u64, alignment: u64) -> Result<Lent, String> {
        let named = || format!("lent memory of {bytes} bytes at {base:#x}");
        if !base.is_multiple_of(alignment) {
            return Err(format!("{}: expected an address that is a multiple of {alignment}", named()));
        }
        let end = base.checked_add(bytes).ok_or_else(|| format!("{}: it ends beyond all addresses", named()))?;
        let mut lent = LENT.lock().unwrap_or_else(PoisonError::into_inner);
        let over = lent.iter().find(|(other, from, to)| *other == space && base < *to && *from < end);
        if let Some((_, from, to)) = over {
            let found = to - from;
            return Err(format!("{}: {found} bytes at {from:#x} are lent already, and overlap it", named()));
        }
        lent.push((space, base, end));
        Ok(Lent { space, base, bytes })
    }

    /// The lowest gap between what is taken, pairs of an address and a length.
    ///
    /// # Errors
    /// The bytes that are free behind all that is taken.
    pub fn place(&self, taken: impl Iterator<Item = (u64, u64)>, bytes: u64, alignment: u64) -> Result<u64, u64> {
        let mut taken: Vec<(u64, u64)> = taken.collect();
        taken.sort_unstable();
        let mut at = self.base;
        for (start, length) in taken {
            if start >= at && start - at >= bytes {
                break;
            }
            at = at.max((start + length).next_multiple_of(alignment));
        }
        let free = (self.base + self.bytes).saturating_sub(at);
        if bytes > free { Err(free) } else { Ok(at) }
    }
}

/// True if memory of an address space, from an address to an end, is lent to a device.
pub fn is_lent(space: &str, base: u64, end: u64) -> bool {
    let lent = LENT.lock().unwrap_or_else(PoisonError::into_inner);
    lent.iter().any(|(other, from, to)| *other == space && base < *to && *from < end)
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut lent = LENT.lock().unwrap_or_else(PoisonError::into_inner);
        let own = (self.space, self.base, self.base + self.bytes);
        if let Some(at) = lent.iter().position(|other| *other == own) {
            lent.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_lent_once() {
        let first = Lent::new("test", 512, 1024, 256).expect("it is free");
        let twice = Lent::new("test", 1280, 512, 256).expect_err("it overlaps");
        assert!(twice.contains("1024 bytes at 0x200 are lent already"), "{twice}");
        assert!(Lent::new("test", 1281, 8, 256).expect_err("it is not aligned").contains("multiple of 256"));
        assert!(Lent::new("test", u64::MAX - 255, 512, 256).is_err());
        Lent::new("elsewhere", 512, 1024, 256).expect("another address space");
        assert_eq!(first.place([(512, 200), (1024, 256)].into_iter(), 256, 256), Ok(768));
        assert_eq!(first.place([(512, 200), (768, 256)].into_iter(), 513, 256), Err(512));
        drop(first);
        Lent::new("test", 1280, 512, 256).expect("it is free again");
    }
}
