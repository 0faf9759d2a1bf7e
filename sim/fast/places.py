"""Where in its arrays the kernel keeps what: names for the numbers, shared by kernel.py and simulate.py."""

from __future__ import annotations

# Of the whole simulation: `glob`.
(
    G_NOW,
    G_SEQ,
    G_NEXT,
    G_CLIENT_AT,
    G_CLIENT_SEQ,
    G_GATE_HEAD,
    G_GATE_TAIL,
    G_OUT,
    G_ENDED,
    G_TURN,
    G_ROWS,
    G_GAPS,
    G_SPANS,
    G_SLOTS,
    G_REASONS,
    G_ERROR,
    G_STEPS,
    G_OUTSIDE,
    G_BEYOND,  # and the four after it, one a feature of models/domain.py
    _,
    _,
    _,
    _,
    G_FOLLOWERS,  # turns whose time to think has begun
    G_HELD_BACK,  # turns whose time to think begins when the present event is over
    G_BEGUN,  # replicas
) = range(26)
GLOBALS = 32

# Of one replica: a row of `rep`.
(
    R_STATE,
    R_AT,
    R_SEQ,
    R_RUNNING,
    R_FREE,
    R_KV_TOKENS,
    R_WAITING,
    R_WAIT_HEAD,
    R_WAIT_TAIL,
    R_INBOX_HEAD,
    R_INBOX_TAIL,
    R_FINISHED,
    R_STEP,
    R_VAIN,
    R_FIRST,
    R_QUEUED,
    R_IN_FLIGHT,
    R_PROMPTS,
    R_DEVICE,
    R_PREEMPTIONS,
    R_RECOMPUTED,
    R_QUERIES,
    R_HITS,
    R_QUERIES_AGAIN,
    R_HITS_AGAIN,
    R_ROWS_FREE,
    R_ODD,  # entries of `odd`; -1: it must be made anew
    R_BACKOFF,  # steps to take request by request, after one that could not be taken otherwise
    R_ORDER,  # admissions so far
    R_DONE,  # steps completed
    R_DONE_BEFORE,  # when the last one was scheduled
    R_STEADY,  # steady requests
    R_STEADY_SUM,  # of their computed tokens, each less the step it joined at
    R_STEADY_MOST,  # the largest of these
    R_STEADY_STALE,  # is that to be looked for again?
    R_STEADY_NS,  # when they all got their last token
    R_RESERVE,  # blocks that they took and that are in nobody's table yet: the first one, -1: none
) = range(37)
REPLICA = 40

# What a replica waits for.
(START, TIMER, ASLEEP, HOST, DEVICE, SETTLE) = range(6)

# Of a request that was admitted and has not ended: a row of `hot`.
(
    H_REQUEST,
    H_KNOWN,
    H_COMPUTED,
    H_HOLES,
    H_HELD,
    H_KV,
    H_FLYING,
    H_STALE,
    H_HIGH,
    H_LAST,
    H_ENDS,
    H_NEXT,
    H_GIVEN,
    H_RUNS,
    H_KEYED,
    H_PREEMPTIONS,
    H_ROW,
    H_TOKEN_NS,
    H_OUT_SINCE,
    H_PROMPT,
    H_ORDER,  # of admission
    H_STEADY,  # see STEADY below
    H_JOINED,  # steps scheduled before the first that it is steady in
    H_FINAL,  # the step that says its last token
    H_BUCKET,  # the next slot with the same final step, -1: none
) = range(25)
HOT = 25
# H_STEADY: by itself; one of those that get one token each step, whose numbers then stand as they were when it
# joined; no longer one of them, but its last steady step is still on its way.
(BY_ITSELF, STEADY, LEFT) = range(3)

# Of a step on its way: a row of `fly`.
(F_COUNT, F_START, F_END, F_FIRST) = range(4)
ROW = 12  # integers noted when a step is scheduled, from F_FIRST on; `rows` has two more columns before
ROW_COLUMNS = 15
# Of its requests: those in `members`, the steady ones, and how many of these joined with it.
(F_MEMBERS, F_STEADY, F_JOINED) = range(16, 19)
FLY = 20

# Of a request in a step on its way: a row of `members`.
(S_SLOT, S_REQUEST, S_TOKENS, S_ORDER) = range(4)
MEMBER = 4

# Settings: `cfg`.
(
    C_REQUESTS,
    C_REPLICAS,
    C_BLOCK,
    C_BLOCKS,
    C_MAX_RUNNING,
    C_BUDGET,
    C_INPUT_BUDGET,
    C_MAX_LEN,
    C_CACHING,
    C_CHUNKS,
    C_RESERVES,
    C_WATERMARK,
    C_LONG,
    C_ADAPTIVE,
    C_LONE,
    C_LONGEST,
    C_UNKEYED_FIRST,
    C_STALE,
    C_DROPS,
    C_KEEPS_PLACE,
    C_ASYNC,
    C_NEXT,
    C_DEPTH,
    C_STAGES,
    C_FRONTEND_NS,
    C_GATE,
    C_PRIORITY,
    C_ROUTE,
    C_IDS_TOKENS,
    C_IDS_KEYS,
    C_HASH,
    C_TABLE,
    C_LOOKS_UP,
    C_COUNTS_ONLY,
    C_SESSIONS,
    C_GROUPS,  # 0: one group of full attention
    C_STEADY,  # may requests be taken together?
    C_CALENDAR,  # places of a replica's calendar
) = range(38)
SETTINGS = 40
BACKOFF = 8

# Routes
(ONE_BY_ONE, FEWEST, FEWEST_TOKENS, OF_TWO, BY_PREFIX, BY_KV) = range(6)
# Why a request was refused
(TOO_LONG, EMPTY, NOT_BELOW) = range(3)
# What went wrong
(FINE, BAD_DEVICE, BAD_HOST, BLOCKS_MATTER) = range(4)

MAX_EVENTS = 1 << 17
MAX_STEP_S = 1e6
NS = 1_000_000_000

# Places in a step model's arrays: models/kernel_params.py, in its order (a test compares).
(
    M_KIND,
    M_CORRECTIONS,
    M_CORRECTIONS_AT,
    M_MAX_TOKENS,
    M_MAX_SEQS,
    M_MAX_MIXED,
    M_MAX_PREFILL,
    M_MAX_DECODE,
    M_WINDOW,
    M_EXPERTS,
    M_BY_TOKENS,
    M_BY_SEQS,
    M_CURVES,
    M_DECODES,
    M_DECODE_N,
    M_DECODE_CURVE,
    M_PREFILLS,
    M_PREFILL_CHUNKS,
    M_PREFILL_CURVE,
    M_MIXED,
    M_MIXED_CHUNKS,
    M_MIXED_ALONE,
    M_MIXED_ROWS,
    M_MIXED_CONTEXT,
    M_MIXED_CELLS,
    M_MIXED_N,
    M_MIXED_CURVE,
    M_SKEWED,
    M_SKEW_CHUNKS_AT,
    M_SKEW_CHUNKS,
    M_SKEW_N_AT,
    M_SKEW_N,
    M_SKEW_SHARE_AT,
    M_SKEW_SHARE,
    M_SKEW_LONGEST_AT,
    M_SKEW_LONGEST,
    M_SKEW_PREFILL_AT,
    M_SKEW_PREFILL,
    M_ALPHA,
    M_BLEND_LENGTHS,
    M_BLEND,
    M_BLEND_POINTS,
    M_TOKENS_CURVE,
) = range(43)
(
    _,
    P_FLOPS,
    P_WEIGHTS,
    P_EXPERT_FLOPS,
    P_PEAK,
    P_BANDWIDTH,
    P_HEAD_FLOPS,
    P_HEAD_BYTES,
    P_SMALL,
    P_REDUCE,
    P_REDUCE_TOKEN,
    P_ATTENTION_FLOPS,
    P_KV_BYTES,
    P_WINDOW_FLOPS,
    P_WINDOW_KV,
    P_ATTENTION_PEAK,
    P_ATTENTION_BANDWIDTH,
    P_ATTENTION_SCALE,
    P_HOST,
    P_HOST_SEQ,
    P_HOST_CHUNK,
    P_ENGINE_SEQ,
    P_ENGINE_CHUNK,
    P_ENGINE_MIXED,
    P_ENGINE_PAIR,
    P_ENGINE_CONTEXT,
    P_ENGINE_KV,
    P_ENGINE_UNEVEN,
) = range(28)
ROOFLINE, TABLES, ENGINE_STEPS = 0, 1, 2
# Coefficients of one correction.
(A_SCALE, A_STEP, A_SEQ, A_KV_TOKEN, A_PREFILL_TOKEN, A_MIXED) = range(6)
CORRECTION = 6

# Of a KV block: a row of `pool`.
(B_NEXT, B_BEFORE, B_REFS, B_CHAIN_NEXT, B_CHAIN_BEFORE) = range(5)
POOL = 5

# Of a KV cache group: a row of `groups`.
(K_BLOCK, K_WINDOW, K_CAP) = range(3)
