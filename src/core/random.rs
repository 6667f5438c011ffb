//! Random numbers from counters: a number is a function of a key and a counter, so there is nothing that draws would change.
//!
//! The function is Threefry-2x32 with 20 rounds (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011): sums, rotations and
//! exclusive ors of 32-bit integers, which every device has. `plimsoll.Random` computes the same bits in kernels.

/// The bits by which each round rotates, over and over.
pub const ROTATIONS: [u32; 8] = [13, 15, 26, 6, 17, 29, 16, 24];
/// The number of rounds.
pub const ROUNDS: usize = 20;
/// The third word of a key is this one and the other two, by exclusive or.
pub const PARITY: u32 = 0x1bd1_1bda;
/// The number of different numbers in 0..1.
pub const NUMBERS: f64 = (1 << 24) as f64;

/// Two words by a key and a counter.
pub fn threefry(key: [u32; 2], [first, second]: [u32; 2]) -> [u32; 2] {
    let keys = [key[0], key[1], PARITY ^ key[0] ^ key[1]];
    let (mut a, mut b) = (first.wrapping_add(keys[0]), second.wrapping_add(keys[1]));
    for round in 0..ROUNDS {
        a = a.wrapping_add(b);
        b = b.rotate_left(ROTATIONS[round % 8]) ^ a;
        if round % 4 == 3 {
            let number = round / 4 + 1;
            a = a.wrapping_add(keys[number % 3]);
            b = b.wrapping_add(keys[(number + 1) % 3]).wrapping_add(number as u32);
        }
    }
    [a, b]
}

/// The key of a stream of numbers, by the seed that all streams share.
pub fn key(seed: u64, stream: u32) -> [u32; 2] {
    threefry([seed as u32, (seed >> 32) as u32], [stream, 0])
}

/// The number of an element in 0..1, which is no 1: a multiple of 2^-24. `draw` counts the draws of a stream.
pub fn uniform(key: [u32; 2], draw: u32, element: u32) -> f64 {
    f64::from(threefry(key, [element, draw])[0] >> 8) / NUMBERS
}

/// What splitmix64 draws, for values that only the host makes up (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
pub fn splitmix(mut seed: u64) -> impl FnMut() -> u64 {
    move || {
        seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(seed)
    }
}

/// A hash of one number: the finalizer of splitmix64.
pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of the authors' library, Random123.
    #[test]
    fn the_words_are_those_of_the_paper() {
        assert_eq!(threefry([0; 2], [0; 2]), [0x6b20_0159, 0x99ba_4efe]);
        assert_eq!(threefry([u32::MAX; 2], [u32::MAX; 2]), [0x1cb9_96fc, 0xbb00_2be7]);
        assert_eq!(threefry([0x1319_8a2e, 0x0370_7344], [0x243f_6a88, 0x85a3_08d3]), [0xc492_3a9c, 0x483d_f7a0]);
    }

    /// The first words of the authors' program.
    #[test]
    fn made_up_words_are_those_of_the_paper() {
        let mut random = splitmix(1_234_567);
        assert_eq!([random(), random()], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
    }

    #[test]
    fn numbers_are_spread_evenly() {
        let key = key(7, 3);
        let numbers: Vec<f64> = (0..100_000).map(|element| uniform(key, 5, element)).collect();
        let mean = numbers.iter().sum::<f64>() / 1e5;
        let variance = numbers.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / 1e5;
        assert!((mean - 0.5).abs() < 4e-3 && (variance - 1.0 / 12.0).abs() < 2e-3, "{mean} {variance}");
        assert!(numbers.iter().all(|x| (0.0..1.0).contains(x)));
    }
}
