//! How attention on the CPU is cut into strips of rows. Only the scores of a strip are held.
//!
//! ```text
//!              keys, values: packed once per matrix when there are several strips
//!            .--------------.
//!   queries  |    d x n     |       scores of a strip          result of a strip
//!   .----.   '--------------'      .--------------.   n x e    .----.
//!   |    | strip              -->  |              |     -->    |    |
//!   '----'                         '--------------'            '----'
//! ```

use super::gemm::{PANEL_ROWS, packed_b_bytes, workspace_bytes};
use crate::dtype::DType;
use crate::kernel::Kernel;

/// The fewest rows of a strip if tile memory is short. With these rows, packing keys and values pays.
pub const FEWEST_ROWS: usize = 4 * PANEL_ROWS;

/// A [`Template::Attention`](crate::kernel::Template::Attention) kernel as a batch of attentions of one head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attention {
    /// Number of heads, over all batch axes.
    pub heads: usize,
    /// Rows of queries and of the result.
    pub m: usize,
    /// Rows of keys and values.
    pub n: usize,
    /// Columns of queries and keys.
    pub d: usize,
    /// Columns of values and of the result.
    pub e: usize,
    /// True if the result is collected in its destination.
    pub direct: bool,
    /// Rows whose scores are held at a time.
    pub strip: usize,
}

impl Attention {
    /// Takes an attention apart, which is [well-formed](Kernel::validate). The scores of `strip` rows are held at a time.
    pub fn new(kernel: &Kernel, strip: usize) -> Attention {
        let Kernel { shape, reads, writes, body, .. } = kernel;
        let batch = shape.len() - 2;
        let [d, n] = [0, 1].map(|i| reads[i].access.shape[batch + 1]);
        let (m, e, out) = (shape[batch], shape[batch + 1], &writes[0]);
        let direct = body.is_identity() && out.dtype == DType::F32;
        let heads = shape[..batch].iter().product();
        Attention { heads, m, n, d, e, direct, strip }
    }

    /// Strips per head.
    pub fn strips(&self) -> usize {
        self.m.div_ceil(self.strip)
    }

    /// True if keys and values are packed once for all strips of a head.
    pub fn packs(&self) -> bool {
        self.strips() > 1
    }

    /// Bytes of the packed keys and of the packed values; none when each product packs what it needs.
    pub fn packed_bytes(&self) -> [usize; 2] {
        let all = [packed_b_bytes(self.d, self.n), packed_b_bytes(self.n, self.e)];
        if self.packs() { all } else { [0; 2] }
    }

    /// Bytes of the scores of a strip.
    pub fn score_bytes(&self) -> usize {
        4 * self.strip.min(self.m) * self.n
    }

    /// Bytes of workspace that the products of a strip need beside the scores.
    pub fn product_bytes(&self) -> usize {
        // The last strip may be lower, and be cut another way.
        let heights = [self.strip.min(self.m), self.m % self.strip];
        let of = |rows: usize| {
            let scores = workspace_bytes(rows, self.n, self.d, false, self.packs(), true);
            scores.max(workspace_bytes(rows, self.e, self.n, false, self.packs(), self.direct))
        };
        heights.map(of).into_iter().max().unwrap_or(0)
    }

    /// Bytes of workspace of a thread: packed keys, packed values, scores, then what the products need; each a multiple of 64.
    pub fn slot_bytes(&self) -> usize {
        let up = |bytes: usize| bytes.next_multiple_of(64);
        let [keys, values] = self.packed_bytes();
        up(keys) + up(values) + up(self.score_bytes()) + up(self.product_bytes())
    }

    /// About how long one thread takes.
    pub fn nanoseconds(&self) -> f64 {
        let scores = self.heads as f64 * self.m as f64 * self.n as f64;
        scores * ((self.d + self.e) as f64 / 50.0 + 0.5)
    }
}
