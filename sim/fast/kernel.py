"""Client, router, engine loop and V1 scheduler as one compiled state machine over arrays (numba).

It takes the decisions of client.py, router.py, engine.py, scheduler_v1.py, kvcache.py and block_pool.py and
does the arithmetic of models/ in the same order; tests/test_fast.py holds both to equal bytes. SimPy's
order of events at one instant is kept by giving every event the next sequence number when it is made.
No `fastmath`: a float that is summed in another order is another float.

`compiled.py` keeps the machine code by the hash of this file and of places.py: import nothing else into it.
`advance` returns when its buffers are full or after `MAX_EVENTS` events, so that Python can drain them, show
progress and be interrupted; all state is in the arrays it was given.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from vsim.sim.fast.places import (
    A_KV_TOKEN,
    A_MIXED,
    A_PREFILL_TOKEN,
    A_SCALE,
    A_SEQ,
    A_STEP,
    ASLEEP,
    B_BEFORE,
    B_CHAIN_BEFORE,
    B_CHAIN_NEXT,
    B_NEXT,
    B_REFS,
    BACKOFF,
    BAD_DEVICE,
    BAD_HOST,
    BLOCKS_MATTER,
    BY_ITSELF,
    BY_KV,
    BY_PREFIX,
    C_ADAPTIVE,
    C_ASYNC,
    C_BLOCK,
    C_BLOCKS,
    C_BUDGET,
    C_CACHING,
    C_CALENDAR,
    C_CHUNKS,
    C_COUNTS_ONLY,
    C_DEPTH,
    C_DROPS,
    C_FRONTEND_NS,
    C_GATE,
    C_GROUPS,
    C_HASH,
    C_IDS_KEYS,
    C_IDS_TOKENS,
    C_INPUT_BUDGET,
    C_KEEPS_PLACE,
    C_LONE,
    C_LONG,
    C_LONGEST,
    C_LOOKS_UP,
    C_MAX_LEN,
    C_MAX_RUNNING,
    C_NEXT,
    C_PRIORITY,
    C_REPLICAS,
    C_REQUESTS,
    C_RESERVES,
    C_ROUTE,
    C_SESSIONS,
    C_STAGES,
    C_STALE,
    C_STEADY,
    C_TABLE,
    C_UNKEYED_FIRST,
    C_WATERMARK,
    CORRECTION,
    DEVICE,
    EMPTY,
    F_COUNT,
    F_END,
    F_FIRST,
    F_JOINED,
    F_MEMBERS,
    F_START,
    F_STEADY,
    FEWEST_TOKENS,
    G_BEGUN,
    G_BEYOND,
    G_CLIENT_AT,
    G_CLIENT_SEQ,
    G_ENDED,
    G_ERROR,
    G_FOLLOWERS,
    G_GAPS,
    G_GATE_HEAD,
    G_GATE_TAIL,
    G_HELD_BACK,
    G_NEXT,
    G_NOW,
    G_OUT,
    G_OUTSIDE,
    G_REASONS,
    G_ROWS,
    G_SEQ,
    G_SLOTS,
    G_SPANS,
    G_STEPS,
    G_TURN,
    H_BUCKET,
    H_COMPUTED,
    H_ENDS,
    H_FINAL,
    H_FLYING,
    H_GIVEN,
    H_HELD,
    H_HIGH,
    H_HOLES,
    H_JOINED,
    H_KEYED,
    H_KNOWN,
    H_KV,
    H_LAST,
    H_NEXT,
    H_ORDER,
    H_OUT_SINCE,
    H_PREEMPTIONS,
    H_PROMPT,
    H_REQUEST,
    H_ROW,
    H_RUNS,
    H_STALE,
    H_STEADY,
    H_TOKEN_NS,
    HOST,
    HOT,
    K_BLOCK,
    K_CAP,
    K_WINDOW,
    LEFT,
    M_ALPHA,
    M_BLEND,
    M_BLEND_LENGTHS,
    M_BLEND_POINTS,
    M_BY_SEQS,
    M_BY_TOKENS,
    M_CORRECTIONS,
    M_CORRECTIONS_AT,
    M_CURVES,
    M_DECODE_CURVE,
    M_DECODE_N,
    M_DECODES,
    M_EXPERTS,
    M_KIND,
    M_MAX_DECODE,
    M_MAX_MIXED,
    M_MAX_PREFILL,
    M_MAX_SEQS,
    M_MAX_TOKENS,
    M_MIXED,
    M_MIXED_ALONE,
    M_MIXED_CELLS,
    M_MIXED_CHUNKS,
    M_MIXED_CONTEXT,
    M_MIXED_CURVE,
    M_MIXED_N,
    M_MIXED_ROWS,
    M_PREFILL_CHUNKS,
    M_PREFILL_CURVE,
    M_PREFILLS,
    M_SKEW_CHUNKS,
    M_SKEW_CHUNKS_AT,
    M_SKEW_LONGEST,
    M_SKEW_LONGEST_AT,
    M_SKEW_N,
    M_SKEW_N_AT,
    M_SKEW_PREFILL,
    M_SKEW_PREFILL_AT,
    M_SKEW_SHARE,
    M_SKEW_SHARE_AT,
    M_SKEWED,
    M_TOKENS_CURVE,
    M_WINDOW,
    MAX_EVENTS,
    MAX_STEP_S,
    MEMBER,
    NOT_BELOW,
    NS,
    OF_TWO,
    ONE_BY_ONE,
    P_ATTENTION_BANDWIDTH,
    P_ATTENTION_FLOPS,
    P_ATTENTION_PEAK,
    P_ATTENTION_SCALE,
    P_BANDWIDTH,
    P_ENGINE_CHUNK,
    P_ENGINE_CONTEXT,
    P_ENGINE_KV,
    P_ENGINE_MIXED,
    P_ENGINE_PAIR,
    P_ENGINE_SEQ,
    P_ENGINE_UNEVEN,
    P_EXPERT_FLOPS,
    P_FLOPS,
    P_HEAD_BYTES,
    P_HEAD_FLOPS,
    P_HOST,
    P_HOST_CHUNK,
    P_HOST_SEQ,
    P_KV_BYTES,
    P_PEAK,
    P_REDUCE,
    P_REDUCE_TOKEN,
    P_SMALL,
    P_WEIGHTS,
    P_WINDOW_FLOPS,
    P_WINDOW_KV,
    R_AT,
    R_BACKOFF,
    R_DONE,
    R_DONE_BEFORE,
    R_FINISHED,
    R_FIRST,
    R_FREE,
    R_HITS,
    R_HITS_AGAIN,
    R_IN_FLIGHT,
    R_INBOX_HEAD,
    R_INBOX_TAIL,
    R_KV_TOKENS,
    R_ODD,
    R_ORDER,
    R_PREEMPTIONS,
    R_PROMPTS,
    R_QUERIES,
    R_QUERIES_AGAIN,
    R_QUEUED,
    R_RECOMPUTED,
    R_RESERVE,
    R_ROWS_FREE,
    R_RUNNING,
    R_SEQ,
    R_STATE,
    R_STEADY,
    R_STEADY_MOST,
    R_STEADY_NS,
    R_STEADY_STALE,
    R_STEADY_SUM,
    R_STEP,
    R_VAIN,
    R_WAIT_HEAD,
    R_WAIT_TAIL,
    R_WAITING,
    ROOFLINE,
    S_ORDER,
    S_REQUEST,
    S_SLOT,
    S_TOKENS,
    SETTLE,
    START,
    STEADY,
    TABLES,
    TIMER,
    TOO_LONG,
)

Array = Any  # numba arrays

# No division by zero is looked for: what a reference path would raise comes out as no number here, and
# `advance` stops at it.
compiled: Any = njit(nogil=True, error_model="numpy")


# --- curves (models/curve.py) ---------------------------------------------------------------------------


@compiled
def bisect_right(values: Array, at: int, count: int, x: float) -> int:
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if x < values[at + middle]:
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def bisect_left(values: Array, at: int, count: int, x: float) -> int:
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if values[at + middle] < x:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def points_at(floats: Array, at: int, count: int, slopes: int, x: float) -> float:
    """`Curve.__call__`: xs at `at`, ys `count` on, slopes at `slopes`."""
    i = bisect_right(floats, at, count, x) - 1
    if i < 0:
        return floats[at + count]
    return floats[at + count + i] + floats[slopes + i] * (x - floats[at + i])


@compiled
def curve(ints: Array, floats: Array, number: int, x: float) -> float:
    place = ints[M_CURVES] + 2 * number
    at, count = ints[place], ints[place + 1]
    return points_at(floats, at, count, at + 2 * count, x)


@compiled
def bracket(floats: Array, at: int, count: int, x: float) -> tuple[int, int, float]:
    if count == 1 or x <= floats[at]:
        return 0, 0, 0.0
    j = min(bisect_right(floats, at, count, x), count - 1)
    i = j - 1
    return i, j, (x - floats[at + i]) / (floats[at + j] - floats[at + i])


@compiled
def blended(ints: Array, floats: Array, n: int) -> tuple[int, int]:
    """Where the decode curve of `n` sequences lies, and its points: `AttentionGrid.decode_curve`."""
    room = ints[M_BLEND_POINTS]
    to = ints[M_BLEND] + n * 3 * room
    known = ints[M_BLEND_LENGTHS] + n
    if ints[known]:
        return to, ints[known]
    i, j, weight = bracket(floats, ints[M_DECODE_N], ints[M_DECODES], float(n))
    a, b = ints[M_DECODE_CURVE] + i, ints[M_DECODE_CURVE] + j
    place = ints[M_CURVES] + 2 * a
    a_at, a_count = ints[place], ints[place + 1]
    place = ints[M_CURVES] + 2 * b
    b_at, b_count = ints[place], ints[place + 1]
    count = 0
    if i == j:
        for k in range(a_count):
            floats[to + k] = floats[a_at + k]
        count = a_count
    else:
        p = q = 0
        while p < a_count or q < b_count:
            if q == b_count or (p < a_count and floats[a_at + p] <= floats[b_at + q]):
                x = floats[a_at + p]
                if q < b_count and floats[b_at + q] == x:
                    q += 1
                p += 1
            else:
                x = floats[b_at + q]
                q += 1
            floats[to + count] = x
            count += 1
    for k in range(count):
        x = floats[to + k]
        y = curve(ints, floats, a, x)
        if i != j:
            y = y + weight * (curve(ints, floats, b, x) - y)
        floats[to + count + k] = y
    xs, ys, slopes = to, to + count, to + 2 * count
    for k in range(count - 1):
        floats[slopes + k] = (floats[ys + k + 1] - floats[ys + k]) / (
            floats[xs + k + 1] - floats[xs + k]
        )
    last = floats[xs + count - 1]
    at = 0
    for k in range(count):
        if floats[xs + k] >= last / 2:
            at = k
            break
    if at == count - 1:
        at = count - 2
    slope = 0.0
    if at >= 0:
        slope = max(0.0, (floats[ys + count - 1] - floats[ys + at]) / (last - floats[xs + at]))
    floats[slopes + count - 1] = slope
    if i == j:  # as it was, not made anew from its own values
        for k in range(3 * count):
            floats[to + k] = floats[a_at + k]
    ints[known] = count
    return to, count


# --- attention (models/attention.py) --------------------------------------------------------------------


@compiled
def alpha_of(
    ints: Array, floats: Array, chunk: float, n: int, longest: float, context: float
) -> float:
    i, j, weight = bracket(floats, ints[M_SKEW_CHUNKS_AT], ints[M_SKEW_CHUNKS], chunk)
    place = j if weight >= 0.5 else i
    at = bisect_left(floats, ints[M_SKEW_N_AT], ints[M_SKEW_N], float(n))
    place = place * (ints[M_SKEW_N] + 1) + at
    at = bisect_left(floats, ints[M_SKEW_SHARE_AT], ints[M_SKEW_SHARE], 1 / n)
    place = place * (ints[M_SKEW_SHARE] + 1) + at
    at = bisect_left(floats, ints[M_SKEW_LONGEST_AT], ints[M_SKEW_LONGEST], longest)
    place = place * (ints[M_SKEW_LONGEST] + 1) + at
    at = bisect_left(floats, ints[M_SKEW_PREFILL_AT], ints[M_SKEW_PREFILL], context)
    place = place * (ints[M_SKEW_PREFILL] + 1) + at
    return floats[ints[M_ALPHA] + place]


@compiled
def mixed_cell(ints: Array, floats: Array, row: int, n: float, kv: float) -> float:
    cells = ints[M_MIXED_CELLS] + row
    low, count = ints[cells], ints[cells + 1] - ints[cells]
    i, j, weight = bracket(floats, ints[M_MIXED_N] + low, count, n)
    y = curve(ints, floats, ints[M_MIXED_CURVE] + low + i, kv)
    if i == j:
        return y
    return y + weight * (curve(ints, floats, ints[M_MIXED_CURVE] + low + j, kv) - y)


@compiled
def mixed_row(ints: Array, floats: Array, number: int, key: float, n: float, kv: float) -> float:
    chunk = floats[ints[M_MIXED_CHUNKS] + number]
    context = key - chunk / 2
    rows = ints[M_MIXED_ROWS] + number
    first, count = ints[rows], ints[rows + 1] - ints[rows]
    axis = ints[M_MIXED_CONTEXT] + first
    if context < 0 or count == 1:
        base = mixed_cell(ints, floats, first, n, kv)
        alone = ints[M_PREFILL_CURVE] + ints[ints[M_MIXED_ALONE] + number]
        return base - (
            curve(ints, floats, alone, floats[axis] + chunk / 2) - curve(ints, floats, alone, key)
        )
    i, j, weight = bracket(floats, axis, count, context)
    y = mixed_cell(ints, floats, first + i, n, kv)
    if i == j:
        return y
    return y + weight * (mixed_cell(ints, floats, first + j, n, kv) - y)


@compiled
def mixed_us(ints: Array, floats: Array, tokens: float, key: float, n: float, kv: float) -> float:
    i, j, weight = bracket(floats, ints[M_MIXED_CHUNKS], ints[M_MIXED], tokens)
    y = mixed_row(ints, floats, i, key, n, kv)
    if i == j:
        return y
    return y + weight * (mixed_row(ints, floats, j, key, n, kv) - y)


@compiled
def attention_us(
    ints: Array,
    floats: Array,
    chunks: int,
    tokens: int,
    work: float,
    n: int,
    context: int,
    longest: int,
) -> float:
    if chunks == 0:
        if n == 0:
            return 0.0
        at, count = blended(ints, floats, n)
        mean = context / n
        y = points_at(floats, at, count, at + 2 * count, mean)
        if ints[M_SKEWED] == 0 or n == 1 or longest <= mean:
            return y
        # Beyond the last edge every length is alike.
        alpha = alpha_of(ints, floats, 0.0, n, float(longest), 0.0)
        if alpha == 0.0:
            return y
        return y + alpha * (points_at(floats, at, count, at + 2 * count, float(longest)) - y)
    key = work / tokens
    if n == 0 or ints[M_MIXED] == 0:
        i, j, weight = bracket(floats, ints[M_PREFILL_CHUNKS], ints[M_PREFILLS], float(tokens))
        y = curve(ints, floats, ints[M_PREFILL_CURVE] + i, key)
        if i != j:
            y = y + weight * (curve(ints, floats, ints[M_PREFILL_CURVE] + j, key) - y)
        if n == 0:
            return y
        at, count = blended(ints, floats, n)
        more = points_at(floats, at, count, at + 2 * count, context / n) - floats[at + count]
        return y + max(0.0, more)
    mean = context / n
    y = mixed_us(ints, floats, float(tokens), key, float(n), mean)
    if ints[M_SKEWED] == 0 or n == 1 or longest <= mean:
        return y
    before = max(0.0, key - tokens / 2)
    alpha = alpha_of(ints, floats, float(tokens), n, float(longest), before)
    if alpha == 0.0:
        return y
    return y + alpha * (mixed_us(ints, floats, float(tokens), key, float(n), float(longest)) - y)


# --- step models (models/roofline.py, tables.py, engine_steps.py, correction.py) --------------------------


@compiled
def device_seconds(
    ints: Array,
    floats: Array,
    chunks: int,
    tokens: int,
    work: float,
    windowed: float,
    chunk_kv: int,
    chunk_context: int,
    n: int,
    context: int,
    longest: int,
) -> float:
    """`chunk_kv`: context plus new tokens of the chunks; `tokens` are those of the chunks."""
    total, seqs = tokens + n, chunks + n
    kind = ints[M_KIND]
    if kind == ROOFLINE:
        flops, moved = total * floats[P_FLOPS], floats[P_WEIGHTS]
        if ints[M_EXPERTS] >= 0:
            moved += floats[ints[M_EXPERTS] + total]
            flops += total * floats[P_EXPERT_FLOPS]
        seconds = max(flops / floats[P_PEAK], moved / floats[P_BANDWIDTH])
        seconds += max(
            seqs * floats[P_HEAD_FLOPS] / floats[P_PEAK], floats[P_HEAD_BYTES] / floats[P_BANDWIDTH]
        )
        seconds += floats[P_SMALL]
        seconds += floats[P_REDUCE] + total * floats[P_REDUCE_TOKEN]
        window = ints[M_WINDOW]
        pairs = 0.0
        kv = 0.0
        if chunks:
            pairs = work * floats[P_ATTENTION_FLOPS]
            kv = chunk_kv * floats[P_KV_BYTES]
            if window:
                pairs += floats[P_WINDOW_FLOPS] * windowed
        flops = pairs + context * floats[P_ATTENTION_FLOPS]
        kv += context * floats[P_KV_BYTES]
        if window:
            seen = min(context, n * window)
            flops += seen * floats[P_WINDOW_FLOPS]
            kv += seen * floats[P_WINDOW_KV]
        seconds = seconds + max(
            flops / floats[P_ATTENTION_PEAK], kv / floats[P_ATTENTION_BANDWIDTH]
        )
    elif kind == TABLES:
        us = attention_us(ints, floats, chunks, tokens, work, n, context, longest)
        attention = floats[P_ATTENTION_SCALE] * us
        fixed = floats[ints[M_BY_TOKENS] + total] + floats[ints[M_BY_SEQS] + seqs]
        seconds = fixed + attention
    else:
        fixed = (
            curve(ints, floats, ints[M_TOKENS_CURVE], float(total)) + floats[P_ENGINE_SEQ] * seqs
        )
        if chunks:
            fixed += floats[P_ENGINE_CHUNK] * chunks
            if n:
                fixed += floats[P_ENGINE_MIXED]
        seconds = (
            fixed
            + floats[P_ENGINE_PAIR] * work
            + floats[P_ENGINE_CONTEXT] * float(chunk_context)
            + floats[P_ENGINE_KV] * float(context)
            + floats[P_ENGINE_UNEVEN] * float(n * longest - context)
        )
    at = ints[M_CORRECTIONS_AT]
    for _correction in range(ints[M_CORRECTIONS]):
        prior = seconds
        seconds = prior * floats[at + A_SCALE] + floats[at + A_STEP] + floats[at + A_SEQ] * seqs
        seconds += floats[at + A_KV_TOKEN] * context
        if chunks:
            seconds += floats[at + A_PREFILL_TOKEN] * tokens
            if n:
                seconds += floats[at + A_MIXED]
        if not seconds > 0.1 * prior:
            seconds = 0.1 * prior
        at += CORRECTION
    return seconds


@compiled
def count_outside(
    ints: Array,
    glob: Array,
    chunks: int,
    tokens: int,
    deepest: int,
    n: int,
    context: int,
) -> None:
    """`Domain.outside`; `deepest`: the longest context before a chunk."""
    glob[G_STEPS] += 1
    beyond = 0
    if ints[M_MAX_TOKENS] >= 0 and tokens + n > ints[M_MAX_TOKENS]:
        glob[G_BEYOND] += 1
        beyond = 1
    if ints[M_MAX_SEQS] >= 0 and chunks + n > ints[M_MAX_SEQS]:
        glob[G_BEYOND + 1] += 1
        beyond = 1
    if chunks:
        if ints[M_MAX_MIXED] >= 0 and n > ints[M_MAX_MIXED]:
            glob[G_BEYOND + 2] += 1
            beyond = 1
        if ints[M_MAX_PREFILL] >= 0 and deepest > ints[M_MAX_PREFILL]:
            glob[G_BEYOND + 3] += 1
            beyond = 1
    if ints[M_MAX_DECODE] >= 0 and context > ints[M_MAX_DECODE] * n:
        glob[G_BEYOND + 4] += 1
        beyond = 1
    glob[G_OUTSIDE] += beyond


# --- blocks (block_pool.py, block_keys.py) ---------------------------------------------------------------
# `pool` has a row for each block of each replica; a replica's null block is the ring's fixed point.


@compiled
def bucket_of(key: int, replica: int, size: int) -> int:
    """First place of a key's chain in `chains`."""
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) & np.uint64(size - 1)
    return 2 * (replica * size + int(mixed))


@compiled
def forget(pool: Array, keys: Array, chains: Array, block: int, bucket: int) -> None:
    before, after = pool[block, B_CHAIN_BEFORE], pool[block, B_CHAIN_NEXT]
    if before < 0:
        chains[bucket] = after
    else:
        pool[before, B_CHAIN_NEXT] = after
    if after < 0:
        chains[bucket + 1] = before
    else:
        pool[after, B_CHAIN_BEFORE] = before
    keys[block] = 0


@compiled
def take(pool: Array, keys: Array, chains: Array, null: int, replica: int, size: int) -> int:
    """The first free block, for new content."""
    block = pool[null, B_NEXT]
    after = pool[block, B_NEXT]
    pool[null, B_NEXT] = after
    pool[after, B_BEFORE] = null
    if keys[block] != 0:
        forget(pool, keys, chains, block, bucket_of(keys[block], replica, size))
    pool[block, B_REFS] = 1
    return block


@compiled
def insert(pool: Array, block: int, before: int) -> None:
    """Into the free ring, right after `before`."""
    after = pool[before, B_NEXT]
    pool[before, B_NEXT] = block
    pool[block, B_BEFORE] = before
    pool[block, B_NEXT] = after
    pool[after, B_BEFORE] = block


@compiled
def register(
    pool: Array, keys: Array, chains: Array, block: int, key: int, replica: int, size: int
) -> None:
    bucket = bucket_of(key, replica, size)
    last = chains[bucket + 1]
    keys[block] = key
    pool[block, B_CHAIN_NEXT] = -1
    pool[block, B_CHAIN_BEFORE] = last
    if last < 0:
        chains[bucket] = block
    else:
        pool[last, B_CHAIN_NEXT] = block
    chains[bucket + 1] = block


@compiled
def find(pool: Array, keys: Array, chains: Array, key: int, replica: int, size: int) -> int:
    """The block registered first of those that hold `key`; -1: none."""
    block = chains[bucket_of(key, replica, size)]
    while block >= 0 and keys[block] != key:
        block = pool[block, B_CHAIN_NEXT]
    return block


@compiled
def number_prefixes(
    offsets: Array, covered: int, prompts: Array, nodes: Array, table: Array
) -> None:
    """Number every distinct sequence of content ids: `nodes` holds ids, then stands for its row's up to there.

    Ids that begin behind their prompt's end are ignored (0). `table`: open-addressed rows of (parent, id,
    number), parent -1 where empty; a power of two of them, more than there are ids. Compiled code here must
    not ask for memory: no numba stands behind it.
    """
    size = table.shape[0]
    last = 0
    mask = np.uint64(size - 1)
    for row in range(len(offsets) - 1):
        parent = 0
        for at in range(offsets[row], offsets[row + 1]):
            if (at - offsets[row]) * covered >= prompts[row]:
                nodes[at] = 0
                continue
            content = nodes[at]
            mixed = (np.uint64(parent) * np.uint64(0x9E3779B97F4A7C15)) ^ (
                np.uint64(content) * np.uint64(0xC2B2AE3D27D4EB4F)
            )
            place = np.int64((mixed ^ (mixed >> np.uint64(31))) & mask)
            while table[place, 0] >= 0 and not (
                table[place, 0] == parent and table[place, 1] == content
            ):
                place = (place + 1) & (size - 1)
            if table[place, 0] < 0:
                last += 1
                table[place, 0] = parent
                table[place, 1] = content
                table[place, 2] = last
            parent = table[place, 2]
            nodes[at] = parent


@compiled
def block_key(cfg: Array, offsets: Array, nodes: Array, request: int, prompt: int, k: int) -> int:
    """The key of a request's block `k`: its shared prefix up to there, else its own; never 0."""
    covered = cfg[C_IDS_TOKENS]
    if covered:
        end = (k + 1) * cfg[C_BLOCK]
        low = offsets[request]
        if end <= min(covered * (offsets[request + 1] - low), prompt):
            piece = (end - 1) // covered
            return nodes[low + piece] * cfg[C_IDS_KEYS] + k - piece * covered // cfg[C_BLOCK]
    return -(request * cfg[C_TABLE] + k) - 1


@compiled
def register_upto(
    cfg: Array,
    hot: Array,
    slot: int,
    tokens: int,
    table: Array,
    offsets: Array,
    nodes: Array,
    pool: Array,
    keys: Array,
    chains: Array,
    replica: int,
) -> None:
    """Make the full blocks within a request's first `tokens` tokens hittable."""
    done, full = hot[slot, H_KEYED], tokens // cfg[C_BLOCK]
    if full <= done:
        return
    row, request, prompt = hot[slot, H_ROW], hot[slot, H_REQUEST], hot[slot, H_PROMPT]
    for k in range(done, full):
        key = block_key(cfg, offsets, nodes, request, prompt, k)
        register(pool, keys, chains, table[row, k], key, replica, cfg[C_HASH])
    hot[slot, H_KEYED] = full


@compiled
def free_request(
    cfg: Array, rep: Array, r: int, hot: Array, slot: int, table: Array, pool: Array, keys: Array
) -> None:
    """Give back all blocks of a request, its last block first."""
    rep[r, R_KV_TOKENS] -= hot[slot, H_KV]
    hot[slot, H_KV] = 0
    held = hot[slot, H_HELD]
    if not cfg[C_CACHING]:
        rep[r, R_FREE] += held
    elif held:
        null = r * cfg[C_BLOCKS]
        row = hot[slot, H_ROW]
        after = null
        freed = 0
        for k in range(held - 1, -1, -1):
            block = table[row, k]
            refs = pool[block, B_REFS] - 1
            pool[block, B_REFS] = refs
            if refs:
                continue
            freed += 1
            if keys[block] != 0 or not cfg[C_UNKEYED_FIRST]:
                insert(pool, block, pool[null, B_BEFORE])
            else:
                insert(pool, block, after)
                after = block
        rep[r, R_FREE] += freed
        rep[r, R_KV_TOKENS] += (held - freed) * cfg[C_BLOCK]
    hot[slot, H_HELD] = 0
    hot[slot, H_KEYED] = 0


# Several groups, or sliding windows: blocks are counted only (kvcache.py). A row of `grouped` holds, by
# group, the blocks in a request's table, and those of them that have left the window.


@compiled
def leave_windows(groups: Array, grouped: Array, hot: Array, slot: int, processed: int) -> int:
    """Give back blocks that no later token sees. Returns how many; `hot` has the request's slots."""
    count = groups.shape[0]
    given = 0
    for g in range(count):
        window = groups[g, K_WINDOW]
        if window == 0:
            continue
        end = max(0, processed - window + 1) // groups[g, K_BLOCK]
        end = min(end, grouped[slot, g])
        gone = end - grouped[slot, count + g]
        if gone > 0:
            grouped[slot, count + g] = end
            hot[slot, H_KV] -= gone * groups[g, K_BLOCK]
            hot[slot, H_HELD] -= gone
            given += gone
    return given


@compiled
def blocks_needed(
    groups: Array, grouped: Array, slot: int, tokens: int, computed: int, capped: bool
) -> int:
    """`KVCache._blocks_needed` without a hit; slot -1: a request that holds nothing."""
    need = 0
    for g in range(groups.shape[0]):
        size, window = groups[g, K_BLOCK], groups[g, K_WINDOW]
        required = (tokens + size - 1) // size
        if capped and groups[g, K_CAP] >= 0:
            required = min(required, groups[g, K_CAP])
        skipped = 0
        if window:
            skipped = max(0, computed - window + 1) // size
        held = 0 if slot < 0 else grouped[slot, g]
        need += max(required - max(skipped, held), 0)
    return need


@compiled
def take_counted(
    groups: Array, grouped: Array, hot: Array, slot: int, tokens: int, total: int
) -> int:
    """Blocks for `tokens` tokens of a request, and slots for `total`. Returns how many blocks."""
    count = groups.shape[0]
    taken = 0
    used = total * count
    for g in range(count):
        size = groups[g, K_BLOCK]
        missing = (tokens + size - 1) // size - grouped[slot, g]
        if missing > 0:
            grouped[slot, g] += missing
            taken += missing
        used -= grouped[slot, count + g] * size
    hot[slot, H_HELD] += taken
    hot[slot, H_KV] = used
    return taken


# --- queues ----------------------------------------------------------------------------------------------


@compiled
def sooner(a: int, b: int, priority: Array, sent: Array) -> bool:
    if priority[a] != priority[b]:
        return priority[a] < priority[b]
    if sent[a] != sent[b]:
        return sent[a] < sent[b]
    return a < b


@compiled
def heap_push(heap: Array, size: int, request: int, priority: Array, sent: Array) -> None:
    at = size
    while at > 0:
        up = (at - 1) // 2
        if not sooner(request, heap[up], priority, sent):
            break
        heap[at] = heap[up]
        at = up
    heap[at] = request


@compiled
def heap_remove(heap: Array, size: int, at: int, priority: Array, sent: Array) -> None:
    """Take out the entry at `at` of `size`."""
    last = heap[size - 1]
    size -= 1
    if at == size:
        return
    while at > 0:
        up = (at - 1) // 2
        if not sooner(last, heap[up], priority, sent):
            break
        heap[at] = heap[up]
        at = up
    while True:
        down = 2 * at + 1
        if down >= size:
            break
        if down + 1 < size and sooner(heap[down + 1], heap[down], priority, sent):
            down += 1
        if not sooner(heap[down], last, priority, sent):
            break
        heap[at] = heap[down]
        at = down
    heap[at] = last


@compiled
def push_waiting(
    cfg: Array,
    rep: Array,
    r: int,
    heap: Array,
    after: Array,
    request: int,
    front: bool,
    priority: Array,
    sent: Array,
) -> None:
    if cfg[C_PRIORITY]:
        heap_push(heap[r], rep[r, R_WAITING], request, priority, sent)
    elif rep[r, R_WAITING] == 0:
        rep[r, R_WAIT_HEAD] = rep[r, R_WAIT_TAIL] = request
        after[request] = -1
    elif front:
        after[request] = rep[r, R_WAIT_HEAD]
        rep[r, R_WAIT_HEAD] = request
    else:
        after[rep[r, R_WAIT_TAIL]] = request
        after[request] = -1
        rep[r, R_WAIT_TAIL] = request
    rep[r, R_WAITING] += 1


@compiled
def remove_waiting(
    cfg: Array,
    rep: Array,
    r: int,
    heap: Array,
    after: Array,
    request: int,
    priority: Array,
    sent: Array,
) -> None:
    """A request that ends while it waits. It ran before, so it stands near the head."""
    if cfg[C_PRIORITY]:
        for at in range(rep[r, R_WAITING]):
            if heap[r, at] == request:
                heap_remove(heap[r], rep[r, R_WAITING], at, priority, sent)
                break
    else:
        before, at = -1, rep[r, R_WAIT_HEAD]
        while at != request:
            before, at = at, after[at]
        if before < 0:
            rep[r, R_WAIT_HEAD] = after[at]
        else:
            after[before] = after[at]
        if after[at] < 0:
            rep[r, R_WAIT_TAIL] = before
    rep[r, R_WAITING] -= 1


# --- client and router (client.py, router.py) -------------------------------------------------------------


@compiled
def place_of(
    cfg: Array,
    glob: Array,
    rep: Array,
    request: int,
    fixed: Array,
    pairs: Array,
) -> int:
    """The replica that a request goes to."""
    count, route = cfg[C_REPLICAS], cfg[C_ROUTE]
    if count == 1:
        return 0
    if route == ONE_BY_ONE:
        glob[G_TURN] = (glob[G_TURN] + 1) % count
        return glob[G_TURN]
    if route == OF_TWO:
        turn = glob[G_TURN]
        glob[G_TURN] = turn + 1
        one, other = pairs[turn, 0], pairs[turn, 1]
        return other if rep[other, R_IN_FLIGHT] < rep[one, R_IN_FLIGHT] else one
    if route == BY_PREFIX and fixed[request] >= 0:
        return fixed[request]
    best = 0
    for r in range(1, count):
        if route == FEWEST_TOKENS:
            if rep[r, R_PROMPTS] != rep[best, R_PROMPTS]:
                better = rep[r, R_PROMPTS] < rep[best, R_PROMPTS]
            else:
                better = rep[r, R_IN_FLIGHT] < rep[best, R_IN_FLIGHT]
        elif route == BY_KV:
            usable = cfg[C_BLOCKS] - 1
            here, there = 1 - rep[r, R_FREE] / usable, 1 - rep[best, R_FREE] / usable
            if rep[r, R_WAITING] != rep[best, R_WAITING]:
                better = rep[r, R_WAITING] < rep[best, R_WAITING]
            elif here != there:
                better = here < there
            else:
                better = rep[r, R_IN_FLIGHT] < rep[best, R_IN_FLIGHT]
        else:
            better = rep[r, R_IN_FLIGHT] < rep[best, R_IN_FLIGHT]
        if better:
            best = r
    return best


@compiled
def send(
    cfg: Array,
    glob: Array,
    rep: Array,
    request: int,
    after: Array,
    prompts: Array,
    sent: Array,
    replica: Array,
    fixed: Array,
    pairs: Array,
) -> None:
    """A request leaves the client for an engine's inbox."""
    glob[G_OUT] += 1
    sent[request] = glob[G_NOW]
    r = place_of(cfg, glob, rep, request, fixed, pairs)
    if cfg[C_REPLICAS] > 1:
        replica[request] = r
    rep[r, R_IN_FLIGHT] += 1
    rep[r, R_PROMPTS] += prompts[request]
    after[request] = -1
    if rep[r, R_INBOX_HEAD] < 0:
        rep[r, R_INBOX_HEAD] = request
    else:
        after[rep[r, R_INBOX_TAIL]] = request
    rep[r, R_INBOX_TAIL] = request
    if rep[r, R_STATE] == ASLEEP and rep[r, R_SEQ] < 0:
        rep[r, R_AT] = glob[G_NOW]
        rep[r, R_SEQ] = glob[G_SEQ]
        glob[G_SEQ] += 1


@compiled
def arrive(
    cfg: Array,
    glob: Array,
    rep: Array,
    request: int,
    after: Array,
    prompts: Array,
    sent: Array,
    replica: Array,
    fixed: Array,
    pairs: Array,
) -> None:
    """The trace sends a request: to an engine, or to the client's gate."""
    if cfg[C_GATE] >= 0 and glob[G_OUT] >= cfg[C_GATE]:
        after[request] = -1
        if glob[G_GATE_HEAD] < 0:
            glob[G_GATE_HEAD] = request
        else:
            after[glob[G_GATE_TAIL]] = request
        glob[G_GATE_TAIL] = request
    else:
        send(cfg, glob, rep, request, after, prompts, sent, replica, fixed, pairs)


@compiled
def begin_thinking(glob: Array, think: Array, held_back: Array, thinking: Array) -> None:
    """Turns whose predecessors ended in the last event: `thinking` is a heap of (when, order, turn)."""
    for k in range(glob[G_HELD_BACK]):
        request = held_back[k]
        when, order = glob[G_NOW] + think[request], glob[G_SEQ]
        glob[G_SEQ] += 1
        at = glob[G_FOLLOWERS]
        glob[G_FOLLOWERS] += 1
        while at > 0:
            up = (at - 1) // 2
            if thinking[up, 0] <= when:  # the order only grows
                break
            for part in range(3):
                thinking[at, part] = thinking[up, part]
            at = up
        thinking[at, 0], thinking[at, 1], thinking[at, 2] = when, order, request
    glob[G_HELD_BACK] = 0


@compiled
def next_turn(glob: Array, thinking: Array) -> int:
    """The turn on top of `thinking`, which leaves it."""
    request = thinking[0, 2]
    size = glob[G_FOLLOWERS] - 1
    glob[G_FOLLOWERS] = size
    when, order, last = thinking[size, 0], thinking[size, 1], thinking[size, 2]
    at = 0
    while True:
        down = 2 * at + 1
        if down >= size:
            break
        if down + 1 < size and (
            thinking[down + 1, 0] < thinking[down, 0]
            or (
                thinking[down + 1, 0] == thinking[down, 0]
                and thinking[down + 1, 1] < thinking[down, 1]
            )
        ):
            down += 1
        if when < thinking[down, 0] or (when == thinking[down, 0] and order < thinking[down, 1]):
            break
        for part in range(3):
            thinking[at, part] = thinking[down, part]
        at = down
    thinking[at, 0], thinking[at, 1], thinking[at, 2] = when, order, last
    return request


@compiled
def ended(
    cfg: Array,
    glob: Array,
    rep: Array,
    r: int,
    request: int,
    after: Array,
    prompts: Array,
    sent: Array,
    replica: Array,
    fixed: Array,
    pairs: Array,
    follower_at: Array,
    followers: Array,
    held_back: Array,
) -> None:
    """A request left the engine: the next at the client's gate may go."""
    rep[r, R_IN_FLIGHT] -= 1
    rep[r, R_PROMPTS] -= prompts[request]
    glob[G_ENDED] += 1
    glob[G_OUT] -= 1
    if cfg[C_SESSIONS]:
        for k in range(follower_at[request], follower_at[request + 1]):
            held_back[glob[G_HELD_BACK]] = followers[k]
            glob[G_HELD_BACK] += 1
    first = glob[G_GATE_HEAD]
    if first >= 0 and (cfg[C_GATE] < 0 or glob[G_OUT] < cfg[C_GATE]):
        glob[G_GATE_HEAD] = after[first]
        send(cfg, glob, rep, first, after, prompts, sent, replica, fixed, pairs)


@compiled
def timer(glob: Array, rep: Array, r: int, state: int, at: int) -> None:
    rep[r, R_STATE] = state
    rep[r, R_AT] = at
    rep[r, R_SEQ] = glob[G_SEQ]
    glob[G_SEQ] += 1


@compiled
def sleep(cfg: Array, glob: Array, rep: Array, r: int, sent: Array) -> None:
    """Until something is in the inbox (`Replica._sleep`)."""
    first = rep[r, R_INBOX_HEAD]
    if first >= 0:
        timer(glob, rep, r, TIMER, max(glob[G_NOW], sent[first] + cfg[C_FRONTEND_NS]))
    else:
        rep[r, R_STATE] = ASLEEP
        rep[r, R_SEQ] = -1


# --- steady requests -----------------------------------------------------------------------------------------
# A request that decodes gets one token in every step until its last one. As long as nobody must give way, all
# such requests are one number: their own numbers stand still in `hot` while they are steady, and what they
# would be follows from the steps scheduled and completed since (`settle`). `classes` counts them by computed
# tokens modulo the block size, so that each step knows how many blocks it needs; `calendar` lists them by
# the step that says their last token. Which of their blocks is whose nobody can tell from outside before
# they leave: with prefix caching they are taken from the pool in time and handed out then.


@compiled
def join(
    cfg: Array, rep: Array, r: int, hot: Array, slot: int, classes: Array, calendar: Array
) -> None:
    """A request becomes steady with the step that is being scheduled."""
    before = rep[r, R_STEP] - 1
    base = hot[slot, H_COMPUTED] - before
    final = before + hot[slot, H_ENDS] - hot[slot, H_KNOWN] - hot[slot, H_HOLES]
    hot[slot, H_STEADY] = STEADY
    hot[slot, H_JOINED] = before
    hot[slot, H_FINAL] = final
    at = final % cfg[C_CALENDAR]
    hot[slot, H_BUCKET] = calendar[r, at]
    calendar[r, at] = slot
    classes[r, base % cfg[C_BLOCK]] += 1
    if rep[r, R_STEADY] == 0:
        rep[r, R_STEADY_STALE] = 0
        rep[r, R_STEADY_MOST] = base
    elif base > rep[r, R_STEADY_MOST]:
        rep[r, R_STEADY_MOST] = base
    rep[r, R_STEADY] += 1
    rep[r, R_STEADY_SUM] += base


@compiled
def settle(
    cfg: Array,
    rep: Array,
    r: int,
    hot: Array,
    slot: int,
    last: int,
    table: Array,
    offsets: Array,
    nodes: Array,
    pool: Array,
    keys: Array,
    chains: Array,
    classes: Array,
) -> None:
    """A steady request's own numbers again; `last`: the last step scheduled with it among the steady."""
    joined, done, size = hot[slot, H_JOINED], rep[r, R_DONE], cfg[C_BLOCK]
    base = hot[slot, H_COMPUTED] - joined
    scheduled, completed = last - joined, max(0, done - joined)
    computed = hot[slot, H_COMPUTED] + scheduled
    hot[slot, H_COMPUTED] = computed
    hot[slot, H_KV] = computed
    hot[slot, H_KNOWN] += completed
    hot[slot, H_FLYING] += scheduled - completed
    if cfg[C_ASYNC]:
        hot[slot, H_HOLES] += scheduled - completed
    if completed:
        hot[slot, H_TOKEN_NS] = rep[r, R_STEADY_NS]
    held = (computed + size - 1) // size
    if cfg[C_CACHING]:
        row = hot[slot, H_ROW]
        for k in range(hot[slot, H_HELD], held):
            block = rep[r, R_RESERVE]
            rep[r, R_RESERVE] = pool[block, B_NEXT]
            table[row, k] = block
        # What the schedules and completions since then would have made hittable.
        full = 0
        if done > joined:
            full = base + done
        if joined < last - 1:
            full = max(full, base + rep[r, R_DONE_BEFORE] + 1)
        hot[slot, H_HELD] = held
        register_upto(cfg, hot, slot, full, table, offsets, nodes, pool, keys, chains, r)
    hot[slot, H_HELD] = held
    hot[slot, H_STEADY] = LEFT
    classes[r, base % size] -= 1
    rep[r, R_STEADY] -= 1
    rep[r, R_STEADY_SUM] -= base
    if base == rep[r, R_STEADY_MOST]:
        rep[r, R_STEADY_STALE] = 1


@compiled
def settle_all(
    cfg: Array,
    rep: Array,
    r: int,
    hot: Array,
    run: Array,
    last: int,
    table: Array,
    offsets: Array,
    nodes: Array,
    pool: Array,
    keys: Array,
    chains: Array,
    fly: Array,
    members: Array,
    classes: Array,
    calendar: Array,
) -> None:
    """No request is steady any more; steps on their way list them all. `last`: the last step scheduled."""
    count = rep[r, R_RUNNING]
    for step in range(rep[r, R_DONE] + 1, last + 1):
        place = (rep[r, R_FIRST] + step - rep[r, R_DONE] - 1) % cfg[C_DEPTH]
        steady = fly[r, place, F_STEADY]
        if steady == 0:
            continue
        # Two lists in order of admission become one, from its end on.
        alone = fly[r, place, F_MEMBERS] - 1
        to = alone + steady
        fly[r, place, F_MEMBERS] = to + 1
        fly[r, place, F_STEADY] = fly[r, place, F_JOINED] = 0
        for position in range(count - 1, -1, -1):
            slot = run[position]
            if (
                hot[slot, H_STEADY] == BY_ITSELF
                or hot[slot, H_JOINED] >= step
                or hot[slot, H_FINAL] < step
            ):
                continue
            order = hot[slot, H_ORDER]
            while alone >= 0 and members[r, place, alone, S_ORDER] > order:
                for k in range(MEMBER):
                    members[r, place, to, k] = members[r, place, alone, k]
                alone -= 1
                to -= 1
            members[r, place, to, S_SLOT] = slot
            members[r, place, to, S_REQUEST] = hot[slot, H_REQUEST]
            members[r, place, to, S_TOKENS] = 3  # one, and it says the next
            members[r, place, to, S_ORDER] = order
            to -= 1
    for position in range(count):
        slot = run[position]
        if hot[slot, H_STEADY] == STEADY:
            settle(cfg, rep, r, hot, slot, last, table, offsets, nodes, pool, keys, chains, classes)
        if hot[slot, H_STEADY] == LEFT:
            hot[slot, H_STEADY] = BY_ITSELF
            calendar[r, hot[slot, H_FINAL] % cfg[C_CALENDAR]] = -1


@compiled
def leave_running(rep: Array, r: int, hot: Array, run: Array, slot: int) -> None:
    """Out of the running requests, which stand in order of admission."""
    order, low, high = hot[slot, H_ORDER], 0, rep[r, R_RUNNING] - 1
    while low < high:
        middle = (low + high) // 2
        if hot[run[middle], H_ORDER] < order:
            low = middle + 1
        else:
            high = middle
    for k in range(low, rep[r, R_RUNNING] - 1):
        run[k] = run[k + 1]
    rep[r, R_RUNNING] -= 1


@compiled
def put_in_order(slots: Array, count: int, slot: int, hot: Array) -> None:
    """Into a list in order of admission."""
    at = count
    while at > 0 and hot[slots[at - 1], H_ORDER] > hot[slot, H_ORDER]:
        slots[at] = slots[at - 1]
        at -= 1
    slots[at] = slot


@compiled
def schedule_steady(
    cfg: Array,
    rep: Array,
    r: int,
    hot: Array,
    run: Array,
    odd: Array,
    joined: Array,
    cap: int,
    table: Array,
    offsets: Array,
    nodes: Array,
    pool: Array,
    keys: Array,
    chains: Array,
    fly: Array,
    aborted: Array,
    classes: Array,
    calendar: Array,
) -> int:
    """Tokens for all running requests, if each gets what it wants and nobody must give way; -1: not so.

    Then nothing has happened but that some may have left the steady ones. Those that go on by themselves are
    in `odd`, in order of admission. What the steady get does not depend on where among them the others stand.
    """
    size, caching, max_len = cfg[C_BLOCK], cfg[C_CACHING], cfg[C_MAX_LEN]
    step_number = rep[r, R_STEP]
    before = step_number - 1
    count, num_odd = rep[r, R_RUNNING], rep[r, R_ODD]
    if num_odd < 0:
        num_odd = count
        for k in range(count):
            odd[k] = run[k]
    if rep[r, R_STEADY]:
        # Whose last token the step before says; it is still on its way.
        slot = calendar[r, before % cfg[C_CALENDAR]]
        while slot >= 0:
            if hot[slot, H_STEADY] == STEADY:
                settle(
                    cfg, rep, r, hot, slot, before, table, offsets, nodes, pool, keys, chains,
                    classes,
                )  # fmt: skip
                put_in_order(odd, num_odd, slot, hot)
                num_odd += 1
            slot = hot[slot, H_BUCKET]
    rep[r, R_ODD] = num_odd
    steady = rep[r, R_STEADY]
    left = min(cfg[C_BUDGET], cfg[C_INPUT_BUDGET]) - steady
    if left < 0:
        return -1
    free = rep[r, R_FREE]
    need = classes[r, -before % size]
    given = -1  # how many were looked at
    for k in range(num_odd):
        slot = odd[k]
        computed, holes = hot[slot, H_COMPUTED], hot[slot, H_HOLES]
        given = k
        if (holes and computed + 2 - holes >= hot[slot, H_LAST]) or step_number < hot[slot, H_NEXT]:
            continue
        new = hot[slot, H_KNOWN] + holes - computed
        if 0 < cap < new:
            new = cap
        new = min(new, cfg[C_LONGEST] - computed)
        if new > left:
            # The budget ends here: right only if it would not have ended before a steady one behind it.
            at = count - 1
            while run[at] != slot:
                if hot[run[at], H_STEADY] == STEADY:
                    need = free + 1
                    break
                at -= 1
            new = left
        if new > 0:
            need += max(0, (min(computed + new, max_len) + size - 1) // size - hot[slot, H_HELD])
            left -= new
            hot[slot, H_GIVEN] = new
        elif new < 0:
            need = free + 1
        if need > free:
            break
    if need > free:
        for k in range(given + 1):
            hot[odd[k], H_GIVEN] = 0
        return -1
    kept = num_joined = 0
    null, hash_size = r * cfg[C_BLOCKS], cfg[C_HASH]
    kv_tokens = rep[r, R_KV_TOKENS]
    for k in range(num_odd):
        slot = odd[k]
        new = hot[slot, H_GIVEN]
        if new == 0:
            odd[kept] = slot
            kept += 1
            continue
        total = hot[slot, H_COMPUTED] + new
        if caching:
            # Before it joins or gets blocks: only blocks that it has hold what is known already …
            full = min(total, hot[slot, H_KNOWN])
        if (
            new == 1
            and hot[slot, H_KNOWN] + hot[slot, H_HOLES] == total
            and hot[slot, H_ENDS] > total
            and hot[slot, H_STEADY] == BY_ITSELF
            and hot[slot, H_STALE] == 0
            and hot[slot, H_HIGH] < total
            and hot[slot, H_KV] == total - 1
            and hot[slot, H_HELD] == (total + size - 2) // size
            and not (len(aborted) and aborted[hot[slot, H_REQUEST]])
            and (not caching or full // size <= hot[slot, H_HELD])
        ):
            if caching:
                register_upto(cfg, hot, slot, full, table, offsets, nodes, pool, keys, chains, r)
            hot[slot, H_GIVEN] = 0
            join(cfg, rep, r, hot, slot, classes, calendar)
            joined[num_joined] = slot
            num_joined += 1
            continue
        held = hot[slot, H_HELD]
        want = (min(total, max_len) + size - 1) // size
        if want > held:
            if caching:
                row = hot[slot, H_ROW]
                for block in range(held, want):
                    table[row, block] = take(pool, keys, chains, null, r, hash_size)
            hot[slot, H_HELD] = want
            free -= want - held
        kv_tokens += total - hot[slot, H_KV]
        hot[slot, H_KV] = total
        if caching and full - hot[slot, H_KEYED] * size >= size:
            register_upto(cfg, hot, slot, full, table, offsets, nodes, pool, keys, chains, r)
        odd[kept] = slot
        kept += 1
    rep[r, R_ODD] = kept
    crossing = classes[r, -before % size]
    if caching:
        for _block in range(crossing):
            block = take(pool, keys, chains, null, r, hash_size)
            pool[block, B_NEXT] = rep[r, R_RESERVE]
            rep[r, R_RESERVE] = block
    rep[r, R_FREE] = free - crossing
    rep[r, R_KV_TOKENS] = kv_tokens + rep[r, R_STEADY]
    place = (rep[r, R_FIRST] + rep[r, R_QUEUED]) % cfg[C_DEPTH]
    fly[r, place, F_STEADY] = rep[r, R_STEADY]
    fly[r, place, F_JOINED] = num_joined
    return left


# --- the loop ----------------------------------------------------------------------------------------------


@compiled
def schedule(
    cfg: Array,
    glob: Array,
    rep: Array,
    r: int,
    hot: Array,
    free_slots: Array,
    slot_of: Array,
    running: Array,
    table: Array,
    free_rows: Array,
    heap: Array,
    after: Array,
    offsets: Array,
    nodes: Array,
    pool: Array,
    keys: Array,
    chains: Array,
    prompts: Array,
    answers: Array,
    caps: Array,
    priority: Array,
    sent: Array,
    marks: Array,
    counts: Array,
    spans: Array,
    fly: Array,
    members: Array,
    scratch: Array,
    ints: Array,
    floats: Array,
    groups: Array,
    grouped: Array,
    aborted: Array,
    odd: Array,
    joined: Array,
    classes: Array,
    calendar: Array,
) -> int:
    """`SchedulerV1.schedule` and `Recorder.scheduled`; notes the step in the next place of `fly`.

    Returns the place. `fly[r, place, F_START]` holds the host's ns, `F_END` the device's.
    """
    now = glob[G_NOW]
    block_size, caching, max_len = cfg[C_BLOCK], cfg[C_CACHING], cfg[C_MAX_LEN]
    null, hash_size = r * cfg[C_BLOCKS], cfg[C_HASH]
    rep[r, R_STEP] += 1
    step_number = rep[r, R_STEP]
    token_budget, input_budget = cfg[C_BUDGET], cfg[C_INPUT_BUDGET]
    run = running[r]
    count = rep[r, R_RUNNING]
    free = rep[r, R_FREE]
    kv_tokens = rep[r, R_KV_TOKENS]

    cap = cfg[C_LONG]
    if cap > 0:
        present = count + rep[r, R_WAITING]
        if present <= 1 and cfg[C_LONE]:
            cap = 0
        elif cfg[C_ADAPTIVE]:
            cap = max(cap, input_budget // max(present, 1))
    else:
        cap = 0

    # Running requests first, in order of admission.
    num_preempted = 0
    longest_len = cfg[C_LONGEST]
    position = 0
    stop = together = False
    batch = (rep[r, R_FIRST] + rep[r, R_QUEUED]) % cfg[C_DEPTH]
    fly[r, batch, F_STEADY] = fly[r, batch, F_JOINED] = 0
    if cfg[C_STEADY]:
        if rep[r, R_BACKOFF] > 0:
            rep[r, R_BACKOFF] -= 1
        else:
            left = schedule_steady(
                cfg, rep, r, hot, run, odd[r], joined[r, batch], cap, table, offsets, nodes, pool,
                keys, chains, fly, aborted, classes, calendar,
            )  # fmt: skip
            if left >= 0:
                together = True
                given = min(token_budget, input_budget) - left
                token_budget -= given
                input_budget -= given
                free, kv_tokens = rep[r, R_FREE], rep[r, R_KV_TOKENS]
            else:
                rep[r, R_BACKOFF] = BACKOFF
                if rep[r, R_STEADY] or rep[r, R_ODD] >= 0:
                    settle_all(
                        cfg, rep, r, hot, run, step_number - 1, table, offsets, nodes, pool, keys,
                        chains, fly, members, classes, calendar,
                    )  # fmt: skip
                rep[r, R_ODD] = -1
    while not together and position < count and token_budget > 0 and input_budget > 0:
        slot = run[position]
        computed, holes = hot[slot, H_COMPUTED], hot[slot, H_HOLES]
        if holes and computed + 2 - holes >= hot[slot, H_LAST]:
            position += 1
            continue
        if step_number < hot[slot, H_NEXT]:
            position += 1
            continue
        new = hot[slot, H_KNOWN] + holes - computed
        if 0 < cap < new:
            new = cap
        new = min(new, token_budget, input_budget, longest_len - computed)
        if new == 0:
            position += 1
            continue
        total = computed + new
        while True:
            within = min(total, max_len)
            held = hot[slot, H_HELD]
            if cfg[C_GROUPS]:
                before_tokens = hot[slot, H_KV]
                flying = hot[slot, H_FLYING]
                free += leave_windows(groups, grouped, hot, slot, max(0, computed - flying))
                kv_tokens += hot[slot, H_KV] - before_tokens
                if blocks_needed(groups, grouped, slot, within, computed, False) <= free:
                    before_tokens = hot[slot, H_KV]
                    free -= take_counted(groups, grouped, hot, slot, within, total)
                    kv_tokens += hot[slot, H_KV] - before_tokens
                    break
            elif within > held * block_size:
                missing = (within + block_size - 1) // block_size - held
                if missing <= free:
                    if caching:
                        row = hot[slot, H_ROW]
                        for k in range(held, held + missing):
                            table[row, k] = take(pool, keys, chains, null, r, hash_size)
                    hot[slot, H_HELD] = held + missing
                    free -= missing
                    break
            else:
                break
            # Somebody has to give way.
            if cfg[C_COUNTS_ONLY]:
                glob[G_ERROR] = BLOCKS_MATTER  # it may find its own blocks again
                return 0
            place = count - 1
            if cfg[C_PRIORITY]:
                place = 0
                for k in range(1, count):
                    a, b = hot[run[k], H_REQUEST], hot[run[place], H_REQUEST]
                    if priority[a] > priority[b] or (
                        priority[a] == priority[b] and sent[a] > sent[b]
                    ):
                        place = k
            victim = run[place]
            count -= 1
            for k in range(place, count):
                run[k] = run[k + 1]
            given = hot[victim, H_GIVEN]
            hot[victim, H_GIVEN] = 0
            token_budget += given
            input_budget += given
            if place < position and (given > 0 or cfg[C_KEEPS_PLACE]):
                position -= 1
            rep[r, R_FREE], rep[r, R_KV_TOKENS] = free, kv_tokens
            free_request(cfg, rep, r, hot, victim, table, pool, keys)
            free, kv_tokens = rep[r, R_FREE], rep[r, R_KV_TOKENS]
            free_rows[r, rep[r, R_ROWS_FREE]] = hot[victim, H_ROW]
            rep[r, R_ROWS_FREE] += 1
            hot[victim, H_ROW] = -1
            hot[victim, H_HIGH] = max(hot[victim, H_HIGH], hot[victim, H_COMPUTED])
            hot[victim, H_RUNS] = 0
            hot[victim, H_COMPUTED] = 0
            if cfg[C_STALE]:
                hot[victim, H_HOLES] = 0
                hot[victim, H_STALE] = hot[victim, H_FLYING]
            hot[victim, H_PREEMPTIONS] += 1
            rep[r, R_PREEMPTIONS] += 1
            if hot[victim, H_OUT_SINCE] < 0:
                hot[victim, H_OUT_SINCE] = now
            request = hot[victim, H_REQUEST]
            push_waiting(cfg, rep, r, heap, after, request, True, priority, sent)
            num_preempted += 1
            if victim == slot:
                stop = True
                break
        if stop:
            break
        if not cfg[C_GROUPS]:
            kv_tokens += total - hot[slot, H_KV]
            hot[slot, H_KV] = total
        if caching:
            full = min(total, hot[slot, H_KNOWN])
            if full - hot[slot, H_KEYED] * block_size >= block_size:
                register_upto(cfg, hot, slot, full, table, offsets, nodes, pool, keys, chains, r)
        hot[slot, H_GIVEN] = new
        token_budget -= new
        input_budget -= new
        position += 1

    # Then the head of the queue, until something refuses.
    if num_preempted == 0:
        skipped = 0  # priority: in `scratch`; else the last one passed over is `before`
        before = -1
        head = rep[r, R_WAIT_HEAD]
        while (
            rep[r, R_WAITING] > 0
            and token_budget > 0
            and input_budget > 0
            and count < cfg[C_MAX_RUNNING]
        ):
            if cfg[C_PRIORITY]:
                head = heap[r, 0]
            elif head < 0:
                break
            slot = slot_of[head]
            if slot >= 0 and hot[slot, H_STALE] > 0:
                if cfg[C_PRIORITY]:
                    heap_remove(heap[r], rep[r, R_WAITING], 0, priority, sent)
                    rep[r, R_WAITING] -= 1
                    scratch[skipped] = head
                    skipped += 1
                else:
                    before = head
                    head = after[head]
                continue
            prompt = prompts[head]
            known = prompt if slot < 0 else hot[slot, H_KNOWN]
            hits = 0
            idle_hits = 0
            if caching:
                limit = (known - 1) // block_size
                at = scratch.shape[0] - cfg[C_TABLE]
                while hits < limit:
                    key = block_key(cfg, offsets, nodes, head, prompt, hits)
                    block = find(pool, keys, chains, key, r, hash_size)
                    if block < 0:
                        break
                    scratch[at + hits] = block
                    if pool[block, B_REFS] == 0:
                        idle_hits += 1
                    hits += 1
            hit_tokens = hits * block_size
            new = known - hit_tokens
            if 0 < cap < new:
                new = cap
            budget = min(token_budget, input_budget)
            if new > budget and not cfg[C_CHUNKS]:
                break
            new = min(new, budget)
            watermark = cfg[C_WATERMARK] if count > 0 else 0
            if cfg[C_RESERVES]:
                whole = min(known, max_len)
                need = max((whole + block_size - 1) // block_size - hits, 0) + idle_hits
                if cfg[C_GROUPS]:
                    need = blocks_needed(groups, grouped, -1, whole, 0, True)
                if need + watermark > free:
                    break
            total = hit_tokens + new
            want = (min(total, max_len) + block_size - 1) // block_size
            need = max(want - hits, 0) + idle_hits
            if cfg[C_GROUPS]:
                need = blocks_needed(groups, grouped, -1, min(total, max_len), 0, False)
            if need + watermark > free:
                break
            # Admitted.
            if cfg[C_PRIORITY]:
                heap_remove(heap[r], rep[r, R_WAITING], 0, priority, sent)
                following = -1
            else:
                following = after[head]
                if before < 0:
                    rep[r, R_WAIT_HEAD] = following
                else:
                    after[before] = following
                if following < 0:
                    rep[r, R_WAIT_TAIL] = before
            rep[r, R_WAITING] -= 1
            if slot < 0:
                glob[G_SLOTS] -= 1
                slot = free_slots[glob[G_SLOTS]]
                slot_of[head] = slot
                for k in range(HOT):
                    hot[slot, k] = 0
                hot[slot, H_REQUEST] = head
                hot[slot, H_KNOWN] = hot[slot, H_PROMPT] = prompt
                hot[slot, H_LAST] = prompt + caps[head]
                room = max_len - prompt
                hot[slot, H_ENDS] = prompt + max(1, min(answers[head], caps[head], room))
                hot[slot, H_TOKEN_NS] = hot[slot, H_OUT_SINCE] = -1
                marks[0, head] = now
                if hit_tokens:  # pages of zeros that nobody writes to take no memory
                    counts[1, head] = hit_tokens
            rep[r, R_ROWS_FREE] -= 1
            row = free_rows[r, rep[r, R_ROWS_FREE]]
            hot[slot, H_ROW] = row
            if cfg[C_LOOKS_UP]:
                if hot[slot, H_PREEMPTIONS]:
                    rep[r, R_QUERIES_AGAIN] += known
                    rep[r, R_HITS_AGAIN] += hit_tokens
                else:
                    rep[r, R_QUERIES] += known
                    rep[r, R_HITS] += hit_tokens
            if caching:
                at = scratch.shape[0] - cfg[C_TABLE]
                for k in range(hits):
                    block = scratch[at + k]
                    table[row, k] = block
                    if pool[block, B_REFS] == 0:
                        one, other = pool[block, B_BEFORE], pool[block, B_NEXT]
                        pool[one, B_NEXT] = other
                        pool[other, B_BEFORE] = one
                        free -= 1
                    else:
                        kv_tokens -= block_size
                    pool[block, B_REFS] += 1
                for k in range(hits, want):
                    table[row, k] = take(pool, keys, chains, null, r, hash_size)
            hot[slot, H_KEYED] = hits
            if cfg[C_GROUPS]:
                for k in range(grouped.shape[1]):
                    grouped[slot, k] = 0
                free -= take_counted(groups, grouped, hot, slot, min(total, max_len), total)
                kv_tokens += hot[slot, H_KV]
            else:
                hot[slot, H_HELD] = max(want, hits)
                free -= max(want - hits, 0)
                kv_tokens += total - hot[slot, H_KV]
                hot[slot, H_KV] = total
            hot[slot, H_COMPUTED] = hit_tokens
            hot[slot, H_RUNS] = 1
            hot[slot, H_GIVEN] = new
            if caching:
                register_upto(
                    cfg, hot, slot, min(total, known), table, offsets, nodes, pool, keys, chains, r
                )
            token_budget -= new
            input_budget -= new
            hot[slot, H_ORDER] = rep[r, R_ORDER]
            rep[r, R_ORDER] += 1
            run[count] = slot
            count += 1
            if together:
                odd[r, rep[r, R_ODD]] = slot
                rep[r, R_ODD] += 1
            if hot[slot, H_OUT_SINCE] >= 0:
                at = glob[G_SPANS]
                spans[at, 0] = head
                spans[at, 1] = hot[slot, H_OUT_SINCE]
                spans[at, 2] = now
                glob[G_SPANS] = at + 1
                hot[slot, H_OUT_SINCE] = -1
            head = following
        for k in range(skipped):
            push_waiting(cfg, rep, r, heap, after, scratch[k], False, priority, sent)
    rep[r, R_RUNNING], rep[r, R_FREE], rep[r, R_KV_TOKENS] = count, free, kv_tokens

    # Take the step as scheduled.
    size = chunks = chunk_tokens = chunk_kv = chunk_context = deepest = 0
    decodes = context_sum = context_max = 0
    steady = 0
    listed, num_listed = run, count
    if together:
        listed, num_listed = odd[r], rep[r, R_ODD]
        steady = rep[r, R_STEADY]
    if steady:
        decodes = steady
        context_sum = rep[r, R_STEADY_SUM] + steady * (step_number - 1)
        if rep[r, R_STEADY_STALE] and ints[M_KIND] != ROOFLINE:
            rep[r, R_STEADY_STALE] = 0
            most = -step_number
            for position in range(count):
                slot = run[position]
                if hot[slot, H_STEADY] == STEADY:
                    most = max(most, hot[slot, H_COMPUTED] - hot[slot, H_JOINED])
            rep[r, R_STEADY_MOST] = most
        context_max = rep[r, R_STEADY_MOST] + step_number - 1
    rep[r, R_DONE_BEFORE] = rep[r, R_DONE]
    work = windowed = 0.0
    window = ints[M_WINDOW]
    is_async = cfg[C_ASYNC]
    next_decode = step_number + cfg[C_NEXT] if cfg[C_NEXT] else 0
    for position in range(num_listed):
        slot = listed[position]
        new = hot[slot, H_GIVEN]
        if new == 0:
            continue
        hot[slot, H_GIVEN] = 0
        computed = hot[slot, H_COMPUTED]
        done = computed + new
        if computed < hot[slot, H_HIGH]:
            again = min(done, hot[slot, H_HIGH]) - computed
            rep[r, R_RECOMPUTED] += again
            counts[2, hot[slot, H_REQUEST]] += again
        hot[slot, H_COMPUTED] = done
        hot[slot, H_FLYING] += new
        emits = 0
        if done >= hot[slot, H_KNOWN] + hot[slot, H_HOLES]:
            emits = 1
            if is_async:
                hot[slot, H_HOLES] += 1
                hot[slot, H_NEXT] = next_decode
        members[r, batch, size, S_SLOT] = slot
        members[r, batch, size, S_REQUEST] = hot[slot, H_REQUEST]
        members[r, batch, size, S_TOKENS] = 2 * new + emits
        members[r, batch, size, S_ORDER] = hot[slot, H_ORDER]
        size += 1
        if new > 1:
            chunks += 1
            chunk_tokens += new
            chunk_context += computed
            chunk_kv += done
            deepest = max(deepest, computed)
            middle = computed + new / 2
            work += new * middle
            if window:
                windowed += new * min(middle, float(window))
        else:
            decodes += 1
            context_sum += computed
            context_max = max(context_max, computed)
    fly[r, batch, F_MEMBERS] = size
    size += steady
    rep[r, R_FINISHED] = 0
    host = device = 0
    if size:
        seconds = floats[P_HOST] + floats[P_HOST_SEQ] * (chunks + decodes)
        seconds = seconds + floats[P_HOST_CHUNK] * chunks
        if not (seconds >= 0 and seconds < MAX_STEP_S):
            glob[G_ERROR] = BAD_HOST
            seconds = 0.0
        host = int(np.rint(seconds * NS))
        seconds = device_seconds(
            ints,
            floats,
            chunks,
            chunk_tokens,
            work,
            windowed,
            chunk_kv,
            chunk_context,
            decodes,
            context_sum,
            context_max,
        )
        if not (seconds >= 0 and seconds < MAX_STEP_S):
            glob[G_ERROR] = BAD_DEVICE
            seconds = 0.0
        device = max(1, int(np.rint(seconds * NS)))
        count_outside(ints, glob, chunks, chunk_tokens, deepest, decodes, context_sum)
    note = fly[r, batch]
    note[F_COUNT] = size
    note[F_START] = host
    note[F_END] = device
    note[F_FIRST] = chunk_tokens + decodes
    note[F_FIRST + 1] = chunk_tokens
    note[F_FIRST + 2] = chunks
    note[F_FIRST + 3] = decodes
    note[F_FIRST + 4] = context_sum
    note[F_FIRST + 5] = count
    note[F_FIRST + 6] = rep[r, R_WAITING]
    note[F_FIRST + 7] = max(cfg[C_BLOCKS] - 1, 0) - free
    note[F_FIRST + 8] = kv_tokens
    note[F_FIRST + 9] = num_preempted
    return batch


@compiled
def advance(
    cfg: Array,
    glob: Array,
    rep: Array,
    hot: Array,
    free_slots: Array,
    slot_of: Array,
    running: Array,
    table: Array,
    free_rows: Array,
    heap: Array,
    after: Array,
    offsets: Array,
    nodes: Array,
    pool: Array,
    keys: Array,
    chains: Array,
    arrivals: Array,
    prompts: Array,
    answers: Array,
    caps: Array,
    priority: Array,
    refused: Array,
    aborted: Array,
    sent: Array,
    replica: Array,
    fixed: Array,
    pairs: Array,
    marks: Array,
    counts: Array,
    ends: Array,
    reason_order: Array,
    rows: Array,
    gaps: Array,
    spans: Array,
    fly: Array,
    members: Array,
    scratch: Array,
    stages: Array,
    ints: Array,
    floats: Array,
    follower_at: Array,
    followers: Array,
    think: Array,
    held_back: Array,
    thinking: Array,
    groups: Array,
    grouped: Array,
    odd: Array,
    joined: Array,
    classes: Array,
    calendar: Array,
    preempted: Array,
) -> bool:
    """Go on with the simulation; False: it is over (no event is left, or `glob[G_ERROR]` says why)."""
    n, num_replicas, depth = cfg[C_REQUESTS], cfg[C_REPLICAS], cfg[C_DEPTH]
    frontend = cfg[C_FRONTEND_NS]
    most = cfg[C_MAX_RUNNING] * (depth + 2)  # one event may complete all batches in flight
    for _event in range(MAX_EVENTS):
        if (
            glob[G_ROWS] + depth + 2 > rows.shape[0]
            or glob[G_GAPS] + most > gaps.shape[0]
            or glob[G_SPANS] + most > spans.shape[0]
            or glob[G_SLOTS] < most
        ):
            return True
        # A follower's process begins before anything else at that instant, but after all replicas'.
        if glob[G_HELD_BACK] and glob[G_BEGUN] == num_replicas:
            begin_thinking(glob, think, held_back, thinking)
        # The next event: the earliest, and of those the one made first.
        who, at, order = -2, 0, 0
        if glob[G_CLIENT_SEQ] >= 0:
            who, at, order = -1, glob[G_CLIENT_AT], glob[G_CLIENT_SEQ]
        for r in range(num_replicas):
            if rep[r, R_SEQ] >= 0 and (
                who == -2 or rep[r, R_AT] < at or (rep[r, R_AT] == at and rep[r, R_SEQ] < order)
            ):
                who, at, order = r, rep[r, R_AT], rep[r, R_SEQ]
        if glob[G_FOLLOWERS] and (
            who == -2 or thinking[0, 0] < at or (thinking[0, 0] == at and thinking[0, 1] < order)
        ):
            who, at = -3, thinking[0, 0]
        if who == -2:
            return False
        glob[G_NOW] = now = at
        if who == -3:
            request = next_turn(glob, thinking)
            arrivals[request] = now
            arrive(cfg, glob, rep, request, after, prompts, sent, replica, fixed, pairs)
            continue
        if who == -1:
            glob[G_CLIENT_SEQ] = -1
            request = glob[G_NEXT]
            while request < n:
                if cfg[C_SESSIONS] and think[request] >= 0:
                    request += 1
                    continue  # sent when its predecessor ends
                if arrivals[request] > now:
                    glob[G_CLIENT_AT] = arrivals[request]
                    glob[G_CLIENT_SEQ] = glob[G_SEQ]
                    glob[G_SEQ] += 1
                    break
                arrive(cfg, glob, rep, request, after, prompts, sent, replica, fixed, pairs)
                request += 1
            glob[G_NEXT] = request
            continue

        r = who
        rep[r, R_SEQ] = -1
        state = rep[r, R_STATE]
        if state == START:
            glob[G_BEGUN] += 1
        if state == ASLEEP:
            rep[r, R_STATE] = START
            first = rep[r, R_INBOX_HEAD]
            if first >= 0 and sent[first] + frontend > now:
                timer(glob, rep, r, TIMER, sent[first] + frontend)
                continue
        elif state == DEVICE:
            # What arrives at this very instant comes before the next schedule().
            timer(glob, rep, r, SETTLE, now)
            continue
        rep[r, R_STATE] = START
        launching = state == HOST
        completing = state == SETTLE
        place = (
            rep[r, R_FIRST] + rep[r, R_QUEUED]
        ) % depth  # of the step that the host was busy with
        while True:
            if not launching and not completing:
                # Drain the inbox.
                while True:
                    request = rep[r, R_INBOX_HEAD]
                    if request < 0 or sent[request] + frontend > now:
                        break
                    rep[r, R_INBOX_HEAD] = after[request]
                    prompt = prompts[request]
                    reason = -1
                    if len(refused) and refused[request]:
                        reason = TOO_LONG
                    elif prompt == 0:
                        reason = EMPTY
                    elif prompt >= cfg[C_MAX_LEN]:
                        reason = NOT_BELOW
                    if reason < 0:
                        push_waiting(cfg, rep, r, heap, after, request, False, priority, sent)
                        continue
                    if reason_order[reason] < 0:
                        reason_order[reason] = glob[G_REASONS]
                        glob[G_REASONS] += 1
                    ends[0, request] = 1
                    ends[1, request] = reason_order[reason]
                    marks[2, request] = now
                    ended(
                        cfg,
                        glob,
                        rep,
                        r,
                        request,
                        after,
                        prompts,
                        sent,
                        replica,
                        fixed,
                        pairs,
                        follower_at,
                        followers,
                        held_back,
                    )
                unfinished = rep[r, R_RUNNING] > 0 or rep[r, R_WAITING] > 0
                if not unfinished and rep[r, R_FINISHED] == 0 and rep[r, R_QUEUED] == 0:
                    sleep(cfg, glob, rep, r, sent)
                    break
                if unfinished or rep[r, R_FINISHED] > 0:
                    place = schedule(
                        cfg,
                        glob,
                        rep,
                        r,
                        hot,
                        free_slots,
                        slot_of,
                        running,
                        table,
                        free_rows,
                        heap,
                        after,
                        offsets,
                        nodes,
                        pool,
                        keys,
                        chains,
                        prompts,
                        answers,
                        caps,
                        priority,
                        sent,
                        marks,
                        counts,
                        spans,
                        fly,
                        members,
                        scratch,
                        ints,
                        floats,
                        groups,
                        grouped,
                        aborted,
                        odd,
                        joined,
                        classes,
                        calendar,
                    )
                    if glob[G_ERROR]:
                        return False
                    host = fly[r, place, F_START]
                    if depth > 1 and host > 0:
                        fly[r, place, F_START] = 0
                        timer(glob, rep, r, HOST, now + host)
                        break
                    launching = True
            if launching:
                launching = False
                note = fly[r, place]
                ready, device = now + note[F_START], note[F_END]
                begin = ready
                if device:
                    begin = max(ready, stages[r, 0])
                end = begin
                if device:
                    num_stages = cfg[C_STAGES]
                    share, rest = device // num_stages, device % num_stages
                    for stage in range(num_stages):
                        end = max(end, stages[r, stage]) + share
                        if stage == 0:
                            end += rest
                        stages[r, stage] = end
                note[F_START], note[F_END] = begin, end
                rep[r, R_QUEUED] += 1
                if rep[r, R_QUEUED] < depth and (
                    note[F_COUNT] > 0
                    or rep[r, R_FINISHED] > 0
                    or rep[r, R_RUNNING] > 0
                    or rep[r, R_WAITING] > 0
                ):
                    continue
            # Wait for the oldest batch.
            oldest = rep[r, R_FIRST]
            note = fly[r, oldest]
            if not completing and note[F_END] > now:
                timer(glob, rep, r, DEVICE, note[F_END])
                break
            completing = False
            rep[r, R_FIRST] = (oldest + 1) % depth
            rep[r, R_QUEUED] -= 1
            emitted = num_finished = 0
            gap, times = -1, 0
            for k in range(note[F_MEMBERS]):
                slot, request = members[r, oldest, k, S_SLOT], members[r, oldest, k, S_REQUEST]
                if hot[slot, H_REQUEST] != request:
                    continue  # it had ended already
                tokens = members[r, oldest, k, S_TOKENS]
                new, emits = tokens // 2, tokens % 2
                hot[slot, H_FLYING] -= new
                stale = hot[slot, H_STALE] > 0
                if stale:
                    hot[slot, H_STALE] -= new
                runs = hot[slot, H_RUNS]
                if not emits or (cfg[C_DROPS] and not runs):
                    continue
                hot[slot, H_KNOWN] += 1
                emitted += 1
                last = hot[slot, H_TOKEN_NS]
                hot[slot, H_TOKEN_NS] = now
                if last < 0:
                    marks[1, request] = now
                elif not (len(aborted) and aborted[request]):
                    if now - last == gap:
                        times += 1
                    else:
                        if times:
                            gaps[glob[G_GAPS], 0] = gap
                            gaps[glob[G_GAPS], 1] = times
                            glob[G_GAPS] += 1
                        gap, times = now - last, 1
                if cfg[C_ASYNC]:
                    if not stale:
                        hot[slot, H_HOLES] -= 1
                    if runs and cfg[C_CACHING]:
                        full = hot[slot, H_COMPUTED] - hot[slot, H_HOLES]
                        if full - hot[slot, H_KEYED] * cfg[C_BLOCK] >= cfg[C_BLOCK]:
                            register_upto(
                                cfg, hot, slot, full, table, offsets, nodes, pool, keys, chains, r
                            )
                if hot[slot, H_KNOWN] >= hot[slot, H_ENDS]:
                    scratch[2 * num_finished] = slot
                    scratch[2 * num_finished + 1] = members[r, oldest, k, S_ORDER]
                    num_finished += 1
            done = rep[r, R_DONE] + 1
            if note[F_STEADY]:
                emitted += note[F_STEADY]
                for k in range(note[F_JOINED]):
                    slot = joined[r, oldest, k]
                    last = hot[slot, H_TOKEN_NS]
                    if last < 0:
                        marks[1, hot[slot, H_REQUEST]] = now
                    elif now - last == gap:
                        times += 1
                    else:
                        if times:
                            gaps[glob[G_GAPS], 0] = gap
                            gaps[glob[G_GAPS], 1] = times
                            glob[G_GAPS] += 1
                        gap, times = now - last, 1
                others = note[F_STEADY] - note[F_JOINED]
                if others:
                    gaps[glob[G_GAPS], 0] = now - rep[r, R_STEADY_NS]
                    gaps[glob[G_GAPS], 1] = others
                    glob[G_GAPS] += 1
                rep[r, R_STEADY_NS] = now
                slot = calendar[r, done % cfg[C_CALENDAR]]
                if slot >= 0:
                    calendar[r, done % cfg[C_CALENDAR]] = -1
                while slot >= 0:
                    if hot[slot, H_STEADY] == STEADY:
                        settle(
                            cfg, rep, r, hot, slot, done, table, offsets, nodes, pool, keys,
                            chains, classes,
                        )  # fmt: skip
                    hot[slot, H_KNOWN] = hot[slot, H_ENDS]
                    if cfg[C_CACHING]:
                        register_upto(
                            cfg, hot, slot, hot[slot, H_ENDS] - 1, table, offsets, nodes, pool, keys,
                            chains, r,
                        )  # fmt: skip
                    order = hot[slot, H_ORDER]
                    at = num_finished
                    while at > 0 and scratch[2 * at - 1] > order:
                        scratch[2 * at] = scratch[2 * at - 2]
                        scratch[2 * at + 1] = scratch[2 * at - 1]
                        at -= 1
                    scratch[2 * at], scratch[2 * at + 1] = slot, order
                    num_finished += 1
                    slot = hot[slot, H_BUCKET]
            rep[r, R_DONE] = done
            if times:
                gaps[glob[G_GAPS], 0] = gap
                gaps[glob[G_GAPS], 1] = times
                glob[G_GAPS] += 1
            if num_finished:
                rep[r, R_FINISHED] += num_finished
                for k in range(num_finished):
                    slot = scratch[2 * k]
                    request = hot[slot, H_REQUEST]
                    scratch[2 * k + 1] = request
                    marks[2, request] = now
                    ends[0, request] = 3 if len(aborted) and aborted[request] else 0
                    counts[0, request] = hot[slot, H_KNOWN] - hot[slot, H_PROMPT]
                    if hot[slot, H_PREEMPTIONS]:
                        preempted[request] = hot[slot, H_PREEMPTIONS]
                    if hot[slot, H_RUNS]:
                        free_request(cfg, rep, r, hot, slot, table, pool, keys)
                        free_rows[r, rep[r, R_ROWS_FREE]] = hot[slot, H_ROW]
                        rep[r, R_ROWS_FREE] += 1
                        leave_running(rep, r, hot, running[r], slot)
                    else:
                        remove_waiting(cfg, rep, r, heap, after, request, priority, sent)
                    hot[slot, H_REQUEST] = -1
                    slot_of[request] = -1
                    free_slots[glob[G_SLOTS]] = slot
                    glob[G_SLOTS] += 1
                if rep[r, R_ODD] > 0:
                    kept = 0
                    for k in range(rep[r, R_ODD]):
                        slot = odd[r, k]
                        if hot[slot, H_REQUEST] >= 0:
                            odd[r, kept] = slot
                            kept += 1
                    rep[r, R_ODD] = kept
                for k in range(num_finished):
                    ended(
                        cfg,
                        glob,
                        rep,
                        r,
                        scratch[2 * k + 1],
                        after,
                        prompts,
                        sent,
                        replica,
                        fixed,
                        pairs,
                        follower_at,
                        followers,
                        held_back,
                    )
            if note[F_COUNT] > 0 or note[F_FIRST + 9] > 0:
                row = rows[glob[G_ROWS]]
                row[0] = note[F_START]
                row[1] = now
                for k in range(10):
                    row[2 + k] = note[F_FIRST + k]
                row[12] = emitted
                row[13] = r
                glob[G_ROWS] += 1
            # Would it go on scheduling nothing until something comes from outside?
            busy = note[F_COUNT] > 0 or note[F_FIRST + 9] > 0
            for k in range(rep[r, R_QUEUED]):
                later = fly[r, (rep[r, R_FIRST] + k) % depth]
                if later[F_COUNT] > 0 or later[F_FIRST + 9] > 0:
                    busy = True
            if busy:
                rep[r, R_VAIN] = 0
                continue
            rep[r, R_VAIN] += 1
            patience = depth if rep[r, R_RUNNING] > 0 else 0
            if rep[r, R_VAIN] > patience and (rep[r, R_RUNNING] > 0 or rep[r, R_WAITING] > 0):
                sleep(cfg, glob, rep, r, sent)
                break
    return True


def _pointer(_typing: Any, address: Any) -> Any:
    """An address as a pointer."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), code


pointer: Any = intrinsic(_pointer)


def entry(places: Array, dims: Array, task: int) -> bool:
    """`advance` with its arrays by address and shape (four numbers each), in the order of its arguments.

    `task` 1 numbers prefixes instead. numba counts references to arrays that come from Python, atomically
    and at every call between compiled functions; arrays made here have none to count.
    """
    if task == 1:
        number_prefixes(
            carray(pointer(places[11]), (dims[44],), np.int64),
            carray(pointer(places[0]), (dims[0],), np.int64)[C_IDS_TOKENS],
            carray(pointer(places[17]), (dims[68],), np.int64),
            carray(pointer(places[12]), (dims[48],), np.int64),
            carray(pointer(places[52]), (dims[208], dims[209]), np.int64),
        )
        return False
    return advance(
        carray(pointer(places[0]), (dims[0],), np.int64),
        carray(pointer(places[1]), (dims[4],), np.int64),
        carray(pointer(places[2]), (dims[8], dims[9]), np.int64),
        carray(pointer(places[3]), (dims[12], dims[13]), np.int64),
        carray(pointer(places[4]), (dims[16],), np.int64),
        carray(pointer(places[5]), (dims[20],), np.int32),
        carray(pointer(places[6]), (dims[24], dims[25]), np.int64),
        carray(pointer(places[7]), (dims[28], dims[29]), np.int32),
        carray(pointer(places[8]), (dims[32], dims[33]), np.int64),
        carray(pointer(places[9]), (dims[36], dims[37]), np.int32),
        carray(pointer(places[10]), (dims[40],), np.int32),
        carray(pointer(places[11]), (dims[44],), np.int64),
        carray(pointer(places[12]), (dims[48],), np.int64),
        carray(pointer(places[13]), (dims[52], dims[53]), np.int32),
        carray(pointer(places[14]), (dims[56],), np.int64),
        carray(pointer(places[15]), (dims[60],), np.int32),
        carray(pointer(places[16]), (dims[64],), np.int64),
        carray(pointer(places[17]), (dims[68],), np.int64),
        carray(pointer(places[18]), (dims[72],), np.int64),
        carray(pointer(places[19]), (dims[76],), np.int64),
        carray(pointer(places[20]), (dims[80],), np.int32),
        carray(pointer(places[21]), (dims[84],), np.bool_),
        carray(pointer(places[22]), (dims[88],), np.bool_),
        carray(pointer(places[23]), (dims[92],), np.int64),
        carray(pointer(places[24]), (dims[96],), np.int32),
        carray(pointer(places[25]), (dims[100],), np.int32),
        carray(pointer(places[26]), (dims[104], dims[105]), np.int32),
        carray(pointer(places[27]), (dims[108], dims[109]), np.int64),
        carray(pointer(places[28]), (dims[112], dims[113]), np.int64),
        carray(pointer(places[29]), (dims[116], dims[117]), np.int16),
        carray(pointer(places[30]), (dims[120],), np.int64),
        carray(pointer(places[31]), (dims[124], dims[125]), np.int64),
        carray(pointer(places[32]), (dims[128], dims[129]), np.int64),
        carray(pointer(places[33]), (dims[132], dims[133]), np.int64),
        carray(pointer(places[34]), (dims[136], dims[137], dims[138]), np.int64),
        carray(pointer(places[35]), (dims[140], dims[141], dims[142], dims[143]), np.int64),
        carray(pointer(places[36]), (dims[144],), np.int64),
        carray(pointer(places[37]), (dims[148], dims[149]), np.int64),
        carray(pointer(places[38]), (dims[152],), np.int64),
        carray(pointer(places[39]), (dims[156],), np.float64),
        carray(pointer(places[40]), (dims[160],), np.int64),
        carray(pointer(places[41]), (dims[164],), np.int32),
        carray(pointer(places[42]), (dims[168],), np.int64),
        carray(pointer(places[43]), (dims[172],), np.int32),
        carray(pointer(places[44]), (dims[176], dims[177]), np.int64),
        carray(pointer(places[45]), (dims[180], dims[181]), np.int64),
        carray(pointer(places[46]), (dims[184], dims[185]), np.int64),
        carray(pointer(places[47]), (dims[188], dims[189]), np.int64),
        carray(pointer(places[48]), (dims[192], dims[193], dims[194]), np.int64),
        carray(pointer(places[49]), (dims[196], dims[197]), np.int64),
        carray(pointer(places[50]), (dims[200], dims[201]), np.int32),
        carray(pointer(places[51]), (dims[204],), np.int32),
    )
