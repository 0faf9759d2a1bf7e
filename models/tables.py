"""A step's device time from layerwise kernel tables: dense curve, attention grid, head, all-reduce, experts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from vsim.models.attention import AttentionGrid
from vsim.models.curve import Curve, bracket
from vsim.models.step import FloatArray, StepShape

US = 1e-6


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Ring all-reduce between `ranks` GPUs: 2 (ranks - 1) hops, each `latency_s` plus its share of the bytes.

    With two ranks: 2 x (latency + half the bytes / bandwidth).
    """

    ranks: int
    latency_s: float
    bytes_per_s: float  # of one link, one way
    bytes_per_token: int  # hidden_size x bytes per activation

    def us(self, tokens: int) -> float:
        hops = 2 * (self.ranks - 1)
        share = tokens * self.bytes_per_token / self.ranks
        return hops * (self.latency_s + share / self.bytes_per_s) / US


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """us of one MoE block: tokens -> curve over activated experts.

    Which experts a batch wakes is not known; `activated` is their expected number when every token picks
    `top_k` of `num_experts` at random: num_experts (1 - (1 - top_k / num_experts) ^ tokens).
    """

    rows: tuple[tuple[int, Curve], ...]  # ascending tokens
    num_experts: int  # on this rank
    top_k: float  # of a token's choices, how many fall on this rank

    def activated(self, tokens: int) -> float:
        if self.top_k >= self.num_experts:
            return float(self.num_experts)
        share = self.top_k / self.num_experts
        return max(
            min(self.top_k, self.num_experts), self.num_experts * (1 - (1 - share) ** tokens)
        )

    def us(self, tokens: int) -> float:
        axis = [at for at, _ in self.rows]
        experts = self.activated(tokens)
        i, j, weight = bracket(axis, tokens)
        low = self.rows[i][1](experts)
        return low if i == j else low + weight * (self.rows[j][1](experts) - low)


def capture_sizes(
    max_num_seqs: int, max_num_batched_tokens: int, largest: int = 512
) -> tuple[int, ...]:
    """CUDA-graph batch sizes as vLLM captures them: 1, 2, 4, then every 8 up to 248, every 16 to M.

    M = min(2 max_num_seqs, `largest`, max_num_batched_tokens) (vLLM 0.19 to 0.32, config/vllm.py
    `_set_cudagraph_sizes`; `largest` is 1024 on sm_10x from 0.2x on).
    """
    top = min(2 * max_num_seqs, largest, max_num_batched_tokens)
    sizes = [s for s in (1, 2, 4) if s <= top]
    sizes += range(8, min(top + 1, 256), 8)
    sizes += range(256, top + 1, 16)
    return tuple(sizes)


@dataclass(slots=True)
class TablesStepModel:
    """Sum of measured kernel times. Curves are in us per call, the result in seconds.

    A step: `per_step`(tokens) + layers x (`per_layer`(tokens) + attention + [experts] + [all-reduces])
    + `head`(sequences that are sampled from: all of them). Tokens are padded to the next CUDA-graph size
    where one exists. No CPU time is in here, and none of the gaps between kernels.
    """

    num_layers: int
    per_step: Curve  # embedding and final norm, over tokens
    per_layer: Curve  # everything of a layer that depends on the number of tokens alone
    head: Curve  # lm_head and sampler, over sequences
    attention: AttentionGrid
    experts: ExpertTable | None = None
    all_reduce: AllReduce | None = None
    all_reduces_per_layer: int = 2
    graph_sizes: Sequence[int] = ()
    host_base_s: float = 0.0
    host_per_seq_s: float = 0.0
    # Tokens that the other ranks of an expert-parallel group bring to this rank's experts, per own token.
    _by_tokens: dict[int, float] = field(default_factory=dict, init=False)
    _by_seqs: dict[int, float] = field(default_factory=dict, init=False)

    def device_seconds(self, shape: StepShape) -> float:
        return self._fixed(
            shape.num_tokens, shape.num_seqs
        ) + self._attention_scale * self.attention.us(shape)

    def decode_run_seconds(self, shape: StepShape, steps: int) -> FloatArray:
        """See `RunStepModel`: only attention changes along the run."""
        fixed = self._fixed(shape.num_decodes, shape.num_decodes)
        seconds: FloatArray = fixed + self._attention_scale * self.attention.decode_run_us(
            shape, steps
        )
        return seconds

    def host_seconds(self, shape: StepShape) -> float:
        return self.host_base_s + self.host_per_seq_s * shape.num_seqs

    @property
    def _attention_scale(self) -> float:
        return self.num_layers * US

    def padded(self, tokens: int) -> int:
        """Tokens as the GPU sees them: the next captured size, or as they are above the largest."""
        sizes = self.graph_sizes
        if not sizes or tokens > sizes[-1]:
            return tokens
        return sizes[bisect_left(sizes, tokens)]

    def _fixed(self, tokens: int, seqs: int) -> float:
        by_tokens = self._by_tokens.get(tokens)
        if by_tokens is None:
            by_tokens = (
                self._token_seconds(self.padded(tokens), self.padded(tokens)) if tokens else 0.0
            )
            self._by_tokens[tokens] = by_tokens
        by_seqs = self._by_seqs.get(seqs)
        if by_seqs is None:
            by_seqs = self._by_seqs[seqs] = self.head(seqs) * US if seqs else 0.0
        return by_tokens + by_seqs

    def _token_seconds(self, tokens: int, expert_tokens: int) -> float:
        layer = self.per_layer(tokens)
        if self.experts is not None:
            layer += self.experts.us(expert_tokens)
        if self.all_reduce is not None:
            layer += self.all_reduces_per_layer * self.all_reduce.us(tokens)
        return (self.per_step(tokens) + self.num_layers * layer) * US
