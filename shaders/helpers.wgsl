// Functions that WGSL devices lack, or compute less exactly than their registers could hold. CUDA's are in prelude.cuh. A text has
// those that it calls, line by line without comments.

// Only the bits tell reliably if a value is not a number.
fn max_f32(x: f32, y: f32) -> f32 {
    if ((bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u) { return x; }
    if ((bitcast<u32>(y) & 0x7fffffffu) > 0x7f800000u) { return y; }
    return max(x, y);
}

fn min_f32(x: f32, y: f32) -> f32 {
    if ((bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u) { return x; }
    if ((bitcast<u32>(y) & 0x7fffffffu) > 0x7f800000u) { return y; }
    return min(x, y);
}

fn sign_f32(x: f32) -> f32 {
    if ((bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u) { return x; }
    return sign(x);
}

// The bits tell what lies beyond the ends, and what is not a number: conversions promise nothing of these.
fn whole_i32_f32(x: f32) -> i32 {
    let bits = bitcast<u32>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) { return 0; }
    if ((bits & 0x7fffffffu) >= 0x4f000000u) { return select(2147483647, -2147483647 - 1, (bits >> 31u) != 0u); }
    return i32(x);
}

// Below 1/4 the Maclaurin series up to x^9 (error 1e-8): differences of exponentials would lose the digits of small values.
fn tanh_f32(x: f32) -> f32 {
    if ((bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u) { return x; }
    if (abs(x) < 0.25f) {
        let s = x * x;
        return x * (1.0f + s * (-0.33333334f + s * (0.13333334f + s * (-0.053968254f + s * 0.021869488f))));
    }
    return tanh(clamp(x, -9.0f, 9.0f));
}

// The Maclaurin series up to x^19 below 1 (error 2e-8), Abramowitz and Stegun 7.1.26 above (error 1.5e-7).
fn erf_f32(x: f32) -> f32 {
    let a = abs(x);
    if (a < 1.0f) {
        let s = x * x;
        var p = -1.0f / 6894720.0f;
        p = p * s + 1.0f / 685440.0f;
        p = p * s - 1.0f / 75600.0f;
        p = p * s + 1.0f / 9360.0f;
        p = p * s - 1.0f / 1320.0f;
        p = p * s + 1.0f / 216.0f;
        p = p * s - 1.0f / 42.0f;
        p = p * s + 1.0f / 10.0f;
        p = p * s - 1.0f / 3.0f;
        return 1.1283792f * x * (p * s + 1.0f);
    }
    let t = 1.0f / (1.0f + 0.3275911f * a);
    let p = ((((1.0614054f * t - 1.4531521f) * t + 1.4214138f) * t - 0.28449672f) * t + 0.2548296f) * t;
    let y = 1.0f - p * exp(-(a * a));
    return select(y, -y, x < 0.0f);
}

// The sine of x + quarter * pi / 2. Cody and Waite's reduction by pi / 2 in three parts: drivers promise little. Where those are no longer
// exact, Payne and Hanek's: the digits of 2 / pi behind those that make whole turns, times the digits of x, byte by byte. What is not
// finite has none.
fn sin_f32(x: f32, quarter: i32) -> f32 {
    let q = round(x * 0.63661975f);
    var r = ((x - q * 1.5703125f) - q * 0.0004837513f) - q * 7.54979e-8f;
    var n = i32(q);
    let bits = bitcast<u32>(x);
    if ((bits & 0x7fffffffu) >= 0x7f800000u) { return bitcast<f32>(bits | 0x7fc00000u); }
    if ((bits & 0x7fffffffu) > 0x46490000u) {
        var words = array<u32, 7>(0u, 0xa2f9836eu, 0x4e441529u, 0xfc2757d1u, 0xf534ddc0u, 0xdb629599u, 0x3c439041u);
        let first = ((bits >> 23u) & 255u) - 120u;
        var high = 0u;
        var low = 0u;
        var carry = 0u;
        for (var i = 0u; i < 12u; i++) {
            let at = (first >> 3u) + 11u - i;
            carry = carry + ((bits & 0x7fffffu) | 0x800000u) * ((words[at >> 2u] >> (24u - 8u * (at & 3u))) & 255u);
            low = (low >> 8u) | (high << 24u);
            high = (high >> 8u) | (carry << 24u);
            carry = carry >> 8u;
        }
        let turns = (high << (first & 7u)) | ((low >> 1u) >> (31u - (first & 7u)));
        let part = bitcast<i32>(turns << 2u);
        n = i32(turns >> 30u) + select(0, 1, part < 0);
        r = f32(part) * 3.6572952e-10f;
        n = select(n, -n, x < 0.0f);
        r = select(r, -r, x < 0.0f);
    }
    let s = r * r;
    let sine = r + r * s * (-0.16666667f + s * (0.008333334f + s * (-0.0001984127f + s * 2.7557319e-6f)));
    let cosine = 1.0f + s * (-0.5f + s * (0.041666668f + s * (-0.0013888889f + s * 2.4801588e-5f)));
    n = n + quarter;
    let y = select(sine, cosine, (n & 1) != 0);
    return select(y, -y, (n & 2) != 0);
}

fn pow_f32(x: f32, y: f32) -> f32 {
    let p = pow(abs(x), y);
    if (y == 0.0f) { return 1.0f; }
    if (x >= 0.0f) { return p; }
    if (floor(y) != y) { return sqrt(x); }
    let odd = abs(y) - 2.0f * floor(abs(y) * 0.5f) == 1.0f;
    return select(p, -p, odd);
}

// Long division of the digits, eight at a time, in integers: a compiler may assume that no float overflows, and flush the small ones.
fn rem_f32(x: f32, y: f32) -> f32 {
    let sign = bitcast<u32>(x) & 0x80000000u;
    let a = bitcast<u32>(x) & 0x7fffffffu;
    let b = bitcast<u32>(y) & 0x7fffffffu;
    if (a >= 0x7f800000u || b == 0u || b > 0x7f800000u) { return bitcast<f32>(a | 0x7fc00000u); }
    if (a < b) { return x; }
    let exponent = max(b >> 23u, 1u);
    let divisor = b - ((exponent - 1u) << 23u);
    var left = max(a >> 23u, 1u) - exponent;
    var r = (a - ((exponent + left - 1u) << 23u)) % divisor;
    for (; left > 0u; left = left - min(left, 8u)) { r = (r << min(left, 8u)) % divisor; }
    if (r == 0u) { return bitcast<f32>(sign); }
    let up = min(countLeadingZeros(r) - 8u, exponent - 1u);
    return bitcast<f32>(sign | ((r << up) + ((exponent - up - 1u) << 23u)));
}

// The bits of the nearest half. Numbers below the normal ones are rounded by a sum with one whose last bit is theirs.
fn f16_bits(x: f32) -> u32 {
    let sign = (bitcast<u32>(x) >> 16u) & 0x8000u;
    let size = bitcast<u32>(x) & 0x7fffffffu;
    if (size > 0x7f800000u) { return sign | 0x7e00u; }
    if (size >= 0x477ff000u) { return sign | 0x7c00u; }
    if (size < 0x38800000u) { return sign | (bitcast<u32>(bitcast<f32>(size) + 0.5f) - 0x3f000000u); }
    return sign | ((size - 0x38000000u + 0xfffu + ((size >> 13u) & 1u)) >> 13u);
}

fn bf16_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) { return (bits >> 16u) | 0x40u; }
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}

fn div_i32(x: i32, y: i32) -> i32 {
    if (y == 0) { return 0; }
    return x / y;
}

fn rem_i32(x: i32, y: i32) -> i32 {
    if (y == 0) { return 0; }
    // GLES leaves open what the remainder of a negative number is.
    return x - (x / y) * y;
}

fn pow_i32(x: i32, y: i32) -> i32 {
    if (y < 0) { return select(0, select(x, 1, (y & 1) == 0), x == 1 || x == -1); }
    var power = 1;
    var square = x;
    for (var e = y; e > 0; e = e / 2) {
        if ((e & 1) != 0) { power = power * square; }
        square = square * square;
    }
    return power;
}
