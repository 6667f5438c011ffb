// Attention of 16-bit floats on tensor cores. A workgroup computes ROWS rows of the result and walks along the keys, STRIPE at a time.
// A team of warps has COLUMNS keys of a stripe, and each of its warps has EACH times 16 rows. Registers hold the scores, the largest score
// and the sum of powers so far, and the values weighted by the powers. A larger score scales down earlier sums. Of eight neighbouring
// columns, a lane has two, in rows `m` and `m + 8`. The keys and values of the next stripes are copied meanwhile. The workgroups of a
// CLUSTER share the stripes of the same rows in turn. Workgroup memory holds a team's keys in such an order that the keys of one
// invocation's scores are neighbours. So are the elements of a mask that it reads. PLAIN scores weigh the values as they are, and may be made
// of a SECOND product. Where there are no VALUES, the logarithm of a row's sum of powers is the result.
constexpr i32 PITCH_B = DEPTH + 8, PITCH_C = WIDTH + 8, PITCH_D = DEPTH_D + 8;
constexpr i32 STAGE = STRIPE * PITCH_B + PART_C + PART_D;
constexpr i32 WARPS = ROWS / 16 / EACH, TILES = COLUMNS / 8, PIECES = WIDTH / 8;
const i32 rank = group % CLUSTER;
const i32 batch = group / CLUSTER / GROUPS;
const i32 lane = thread % 32;
const i32 team = thread / 32 / WARPS;
const i32 m = group / CLUSTER % GROUPS * ROWS + thread / 32 % WARPS * 16 * EACH + lane / 4;
const i32 column = lane % 4 * 2;
//@ if BAND
const i32 origin = first_key(group / CLUSTER % GROUPS * ROWS) / STRIPE * STRIPE;
const i32 end = end_key(group / CLUSTER % GROUPS * ROWS + ROWS);
//@ else
constexpr i32 origin = 0, end = N;
//@ end
const auto place = [&](i32 n) {
    return n / COLUMNS * COLUMNS + n % (2 * TILES) / 2 * 8 + n % COLUMNS / (2 * TILES) * 2 + n % 2;
};
const auto fetch = [&](i32 first, i32 stage) {
    element* const tile_b = tile + stage * STAGE;
    element* const tile_c = tile_b + STRIPE * PITCH_B;
    if (first < end) {
        //@ if B_WIDE
        #pragma unroll
        for (i32 i = 0; i < (STRIPE * DEPTH / 8 + SIZE - 1) / SIZE; i++) {
            const i32 s = thread + i * SIZE;
            if (STRIPE * DEPTH / 8 % SIZE > 0 && s >= STRIPE * DEPTH / 8) {
                break;
            }
            const i32 n = s / (DEPTH / 8);
            const i32 k = s % (DEPTH / 8) * 8;
            const bool there = first + n < N && k < K;
            copy_async(tile_b + place(n) * PITCH_B + k, b_at(batch, there ? k : 0, there ? first + n : 0), there);
        }
        //@ else
        for (i32 s = thread; s < STRIPE * DEPTH; s += SIZE) {
            const i32 n = s / B_N_STEP % STRIPE;
            const i32 k = s / B_K_STEP % DEPTH;
            tile_b[place(n) * PITCH_B + k] = element(first + n < N && k < K ? b(batch, k, first + n) : 0.0f);
        }
        //@ end
        //@ if VALUES
        //@ if C_WIDE
        #pragma unroll
        for (i32 i = 0; i < (STRIPE * WIDTH / 8 + SIZE - 1) / SIZE; i++) {
            const i32 s = thread + i * SIZE;
            if (STRIPE * WIDTH / 8 % SIZE > 0 && s >= STRIPE * WIDTH / 8) {
                break;
            }
            const i32 n = s / (WIDTH / 8);
            const i32 e = s % (WIDTH / 8) * 8;
            const bool there = first + n < N && e < COLUMNS_OUT;
            copy_async(tile_c + place(n) * PITCH_C + e, c_at(batch, there ? first + n : 0, there ? e : 0), there);
        }
        //@ else
        for (i32 s = thread; s < STRIPE * WIDTH; s += SIZE) {
            const i32 n = s / WIDTH;
            const i32 e = s % WIDTH;
            tile_c[place(n) * PITCH_C + e] = element(first + n < N && e < COLUMNS_OUT ? c(batch, first + n, e) : 0.0f);
        }
        //@ end
        //@ end
        //@ if SECOND
        element* const tile_d = tile_c + PART_C;
        //@ if D_WIDE
        #pragma unroll
        for (i32 i = 0; i < (STRIPE * DEPTH_D / 8 + SIZE - 1) / SIZE; i++) {
            const i32 s = thread + i * SIZE;
            if (STRIPE * DEPTH_D / 8 % SIZE > 0 && s >= STRIPE * DEPTH_D / 8) {
                break;
            }
            const i32 n = s / (DEPTH_D / 8);
            const i32 k = s % (DEPTH_D / 8) * 8;
            const bool there = first + n < N && k < K_D;
            copy_async(tile_d + place(n) * PITCH_D + k, d_at(batch, there ? k : 0, there ? first + n : 0), there);
        }
        //@ else
        for (i32 s = thread; s < STRIPE * DEPTH_D; s += SIZE) {
            const i32 n = s / D_N_STEP % STRIPE;
            const i32 k = s / D_K_STEP % DEPTH_D;
            tile_d[place(n) * PITCH_D + k] = element(first + n < N && k < K_D ? d(batch, k, first + n) : 0.0f);
        }
        //@ end
        //@ end
    }
    commit_copies();
};
#pragma unroll
for (i32 stage = 0; stage < STAGES - 1; stage++) {
    fetch(origin + (rank + stage * CLUSTER) * STRIPE, stage);
}
u32 x[EACH][DEPTH / 16][4];
#pragma unroll
for (i32 i = 0; i < EACH * DEPTH / 4; i++) {
    const i32 part = i / (DEPTH / 4);
    const i32 row = m + part * 16 + i % 2 * 8;
    const i32 k = i % (DEPTH / 4) / 4 * 16 + i / 2 % 2 * 8 + column;
    u32& both = x[part][i % (DEPTH / 4) / 4][i % 4];
    both = 0;
    if (row < M && k < K) {
        //@ if A_WIDE
        both = bitcast<u32>(a_wide(batch, row, k));
        //@ else
        both = pair<element>(a(batch, row, k), k + 1 < K ? a(batch, row, k + 1) : 0.0f);
        //@ end
    }
}
//@ if SECOND
u32 gradient[EACH][DEPTH_D / 16][4];
#pragma unroll
for (i32 i = 0; i < EACH * DEPTH_D / 4; i++) {
    const i32 part = i / (DEPTH_D / 4);
    const i32 row = m + part * 16 + i % 2 * 8;
    const i32 k = i % (DEPTH_D / 4) / 4 * 16 + i / 2 % 2 * 8 + column;
    u32& both = gradient[part][i % (DEPTH_D / 4) / 4][i % 4];
    both = 0;
    if (row < M && k < K_D) {
        //@ if G_WIDE
        both = bitcast<u32>(g_wide(batch, row, k));
        //@ else
        both = pair<element>(g(batch, row, k), k + 1 < K_D ? g(batch, row, k + 1) : 0.0f);
        //@ end
    }
}
//@ end
// The rows of `x`, in order: those of the first 16, then those eight further down.
f32 top[EACH * 2], total[EACH * 2];
#pragma unroll
for (i32 i = 0; i < EACH * 2; i++) {
    top[i] = LOWEST;
    total[i] = 0.0f;
}
//@ if VALUES
f32 sum[EACH][PIECES][4];
#pragma unroll
for (i32 i = 0; i < EACH * PIECES * 4; i++) {
    sum[i / (PIECES * 4)][i / 4 % PIECES][i % 4] = 0.0f;
}
//@ end
i32 stage = 0;
for (i32 n0 = origin + rank * STRIPE; n0 < end; n0 += CLUSTER * STRIPE) {
    wait_copies<STAGES - 2>();
    __syncthreads();
    fetch(n0 + (STAGES - 1) * CLUSTER * STRIPE, stage == 0 ? STAGES - 1 : stage - 1);
    const element* const tile_b = tile + stage * STAGE + team * COLUMNS * PITCH_B;
    //@ if VALUES
    const element* const tile_c = tile + stage * STAGE + STRIPE * PITCH_B + team * COLUMNS * PITCH_C;
    //@ end
    //@ if SECOND
    const element* const tile_d = tile + stage * STAGE + STRIPE * PITCH_B + PART_C + team * COLUMNS * PITCH_D;
    //@ end
    stage = stage == STAGES - 1 ? 0 : stage + 1;
    const i32 first = n0 + team * COLUMNS + lane % 4 * 2 * TILES;
    #pragma unroll
    for (i32 i = 0; i < EACH * 2 * TILES; i++) {
        look(batch, m + i / TILES * 8, first + i % TILES * 2, i);
    }
    f32 score_of[EACH][TILES][4];
    #pragma unroll
    for (i32 j = 0; j < TILES; j += 2) {
        #pragma unroll
        for (i32 i = 0; i < EACH * 8; i++) {
            score_of[i / 8][j + i / 4 % 2][i % 4] = 0.0f;
        }
        #pragma unroll
        for (i32 k = 0; k < DEPTH; k += 16) {
            u32 y[4];
            load_matrices(y, tile_b + (j * 8 + lane / 16 * 8 + lane % 8) * PITCH_B + k + lane / 8 % 2 * 8);
            #pragma unroll
            for (i32 part = 0; part < EACH; part++) {
                multiply<element>(score_of[part][j], x[part][k / 16], y[0], y[1]);
                multiply<element>(score_of[part][j + 1], x[part][k / 16], y[2], y[3]);
            }
        }
    }
    //@ if SECOND
    f32 other_of[EACH][TILES][4];
    #pragma unroll
    for (i32 j = 0; j < TILES; j += 2) {
        #pragma unroll
        for (i32 i = 0; i < EACH * 8; i++) {
            other_of[i / 8][j + i / 4 % 2][i % 4] = 0.0f;
        }
        #pragma unroll
        for (i32 k = 0; k < DEPTH_D; k += 16) {
            u32 y[4];
            load_matrices(y, tile_d + (j * 8 + lane / 16 * 8 + lane % 8) * PITCH_D + k + lane / 8 % 2 * 8);
            #pragma unroll
            for (i32 part = 0; part < EACH; part++) {
                multiply<element>(other_of[part][j], gradient[part][k / 16], y[0], y[1]);
                multiply<element>(other_of[part][j + 1], gradient[part][k / 16], y[2], y[3]);
            }
        }
    }
    //@ end
    //@ if PLAIN
    #pragma unroll
    for (i32 i = 0; i < EACH * 2 * TILES * 2; i++) {
        const i32 row = i / (TILES * 2);
        const i32 j = i / 2 % TILES;
        const i32 v = i % 2;
        const i32 n = first + j * 2 + v;
        f32& s = score_of[row / 2][j][row % 2 * 2 + v];
        //@ if SECOND
        s = score(batch, m + row * 8, n, row * TILES + j, v, s, other_of[row / 2][j][row % 2 * 2 + v]);
        //@ else
        s = score(batch, m + row * 8, n, row * TILES + j, v, s);
        //@ end
        //@ if RAGGED
        if (n0 + STRIPE > N && n >= N) {
            s = 0.0f;
        }
        //@ end
    }
    //@ else
    #pragma unroll
    for (i32 row = 0; row < EACH * 2; row++) {
        f32 largest = top[row];
        #pragma unroll
        for (i32 j = 0; j < TILES; j++) {
            const i32 n = first + j * 2;
            #pragma unroll
            for (i32 v = 0; v < 2; v++) {
                f32& s = score_of[row / 2][j][row % 2 * 2 + v];
                s = score(batch, m + row * 8, n + v, row * TILES + j, v, s);
                //@ if RAGGED
                if (n0 + STRIPE > N && n + v >= N) {
                    s = bitcast<f32>(0xff800000u);
                }
                //@ end
                largest = max(largest, s);
            }
        }
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        const f32 fade = power_of_two((top[row] - largest) * UNIT);
        top[row] = largest;
        total[row] *= fade;
        //@ if VALUES
        #pragma unroll
        for (i32 i = 0; i < PIECES * 2; i++) {
            sum[row / 2][i / 2][row % 2 * 2 + i % 2] *= fade;
        }
        //@ end
        #pragma unroll
        for (i32 i = 0; i < TILES * 2; i++) {
            f32& s = score_of[row / 2][i / 2][row % 2 * 2 + i % 2];
            //@ if LINEAR
            s = power_of_two(s * UNIT - largest * UNIT);
            //@ else
            s = power_of_two((s - largest) * UNIT);
            //@ end
            total[row] += s;
        }
    }
    //@ end
    //@ if VALUES
    #pragma unroll
    for (i32 j = 0; j < TILES; j += 2) {
        u32 weights[EACH][4];
        #pragma unroll
        for (i32 i = 0; i < EACH * 4; i++) {
            const auto& from = score_of[i / 4][j + i / 2 % 2];
            weights[i / 4][i % 4] = pair<element>(from[i % 2 * 2], from[i % 2 * 2 + 1]);
        }
        #pragma unroll
        for (i32 e = 0; e < PIECES; e += 2) {
            u32 y[4];
            load_transposed(y, tile_c + (j * 8 + lane % 16) * PITCH_C + e * 8 + lane / 16 * 8);
            #pragma unroll
            for (i32 part = 0; part < EACH; part++) {
                multiply<element>(sum[part][e], weights[part], y[0], y[1]);
                multiply<element>(sum[part][e + 1], weights[part], y[2], y[3]);
            }
        }
    }
    //@ end
}
#pragma unroll
for (i32 row = 0; row < EACH * 2; row++) {
    total[row] += __shfl_xor_sync(0xffffffffu, total[row], 1);
    total[row] += __shfl_xor_sync(0xffffffffu, total[row], 2);
}
//@ if VALUES
const auto finish = [&](i32 row, i32 piece, f32 whole, f32 low, f32 high) {
    //@ if SOFTMAX
    const f32 scale = 1.0f / whole;
    low *= scale;
    high *= scale;
    //@ end
    //@ if GUARDED
    if (weightless(whole)) {
        low = high = 0.0f;
    }
    //@ end
    //@ if STORE_WIDE
    store_wide(batch, row, piece * 8 + column, low, high);
    //@ else
    store(batch, row, piece * 8 + column, low);
    store(batch, row, piece * 8 + column + 1, high);
    //@ end
};
//@ if PARTS
// Every warp writes the results for its keys: the largest scores and the sums of powers first. Then each warp combines some of the
// columns, first over the teams, then over the cluster.
constexpr i32 LANES = WARPS * 32 * 4, SLOTS = 1 + PIECES;
struct Found {
    f32 largest[2], whole[2], value[4];
};
const auto collect = [&](i32 parts, const auto& at, i32 slot) {
    Found found = {{LOWEST, LOWEST}, {0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
    #pragma unroll
    for (i32 part = 0; part < parts; part++) {
        const auto head = read<f32, 4>(at(part, 0));
        found.largest[0] = max(found.largest[0], head.v[0]);
        found.largest[1] = max(found.largest[1], head.v[1]);
    }
    #pragma unroll
    for (i32 part = 0; part < parts; part++) {
        const auto head = read<f32, 4>(at(part, 0));
        const auto theirs = read<f32, 4>(at(part, slot));
        #pragma unroll
        for (i32 half = 0; half < 2; half++) {
            const f32 weight = power_of_two((head.v[half] - found.largest[half]) * UNIT);
            found.whole[half] += head.v[2 + half] * weight;
            found.value[half * 2] += theirs.v[half * 2] * weight;
            found.value[half * 2 + 1] += theirs.v[half * 2 + 1] * weight;
        }
    }
    return found;
};
wait_copies();
__syncthreads();
f32* const kept = reinterpret_cast<f32*>(tile) + thread % (WARPS * 32) * 4;
#pragma unroll
for (i32 part = 0; part < EACH; part++) {
    f32* const to = kept + (team * EACH + part) * SLOTS * LANES;
    write(to, wide<f32, 4>{top[part * 2], top[part * 2 + 1], total[part * 2], total[part * 2 + 1]});
    #pragma unroll
    for (i32 e = 0; e < PIECES; e++) {
        const auto& from = sum[part][e];
        write(to + (1 + e) * LANES, wide<f32, 4>{from[0], from[1], from[2], from[3]});
    }
}
__syncthreads();
//@ if CLUSTERED
f32* const shared = kept + TEAMS * EACH * SLOTS * LANES;
//@ end
for (i32 i = team; i < EACH * PIECES; i += TEAMS) {
    const i32 part = i / PIECES;
    const i32 e = i % PIECES;
    const auto of_team = [&](i32 other, i32 slot) {
        return kept + ((other * EACH + part) * SLOTS + slot) * LANES;
    };
    const Found found = collect(TEAMS, of_team, 1 + e);
    //@ if CLUSTERED
    f32* const to = shared + part * SLOTS * LANES;
    write(to + (1 + e) * LANES, wide<f32, 4>{found.value[0], found.value[1], found.value[2], found.value[3]});
    if (e == 0) {
        write(to, wide<f32, 4>{found.largest[0], found.largest[1], found.whole[0], found.whole[1]});
    }
    //@ else
    finish(m + part * 16, e, found.whole[0], found.value[0], found.value[1]);
    finish(m + part * 16 + 8, e, found.whole[1], found.value[2], found.value[3]);
    //@ end
}
//@ if CLUSTERED
meet_cluster();
for (i32 i = rank * TEAMS + team; i < EACH * PIECES; i += CLUSTER * TEAMS) {
    const i32 part = i / PIECES;
    const i32 e = i % PIECES;
    const auto of_cluster = [&](i32 other, i32 slot) {
        return neighbours(shared + (part * SLOTS + slot) * LANES, other);
    };
    const Found found = collect(CLUSTER, of_cluster, 1 + e);
    finish(m + part * 16, e, found.whole[0], found.value[0], found.value[1]);
    finish(m + part * 16 + 8, e, found.whole[1], found.value[2], found.value[3]);
}
// Wait, because a neighbour may still read this workgroup's memory.
meet_cluster();
//@ end
//@ else
#pragma unroll
for (i32 i = 0; i < EACH * 2 * PIECES; i++) {
    const i32 row = i / PIECES;
    const i32 e = i % PIECES;
    const auto& from = sum[row / 2][e];
    finish(m + row * 8, e, total[row], from[row % 2 * 2], from[row % 2 * 2 + 1]);
}
//@ end
//@ else
if (column == 0) {
    #pragma unroll
    for (i32 row = 0; row < EACH * 2; row++) {
        store(batch, m + row * 8, 0, (top[row] * UNIT + log2f(total[row])) * LN_2);
    }
}
//@ end
