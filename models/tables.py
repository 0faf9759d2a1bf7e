"""A step's device time from layerwise kernel tables: dense curve, attention grid, head, experts, links."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from vsim.models.attention import AttentionGrid
from vsim.models.curve import Curve, bracket
from vsim.models.links import Link
from vsim.models.step import FloatArray, StepShape

US = 1e-6


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """us of one MoE block: tokens -> curve over activated experts, as measured with all experts on one GPU.

    `ranks` GPUs share the experts (expert parallelism): all of them see the group's tokens, each computes
    the choices that fall on its own experts. Which experts a batch wakes is not known; `activated` is their
    expected number when every token picks `top_k` of `num_experts` at random.
    """

    rows: tuple[tuple[int, Curve], ...]  # ascending tokens
    num_experts: int  # of the model
    top_k: int
    ranks: int = 1

    def activated(self, tokens: float) -> float:
        """Expected number of a rank's experts that the group's `tokens` wake; at least one."""
        local = self.num_experts / self.ranks
        share = min(1.0, self.top_k / self.num_experts)
        return max(min(1.0, local), local * (1 - (1 - share) ** tokens))

    def us(self, group_tokens: float) -> float:
        """us of a rank's block when the group has `group_tokens` tokens."""
        experts = self.activated(group_tokens)
        # A rank's share of the token-expert pairs is that of a lone GPU with so many fewer tokens.
        tokens = group_tokens / self.ranks
        i, j, weight = bracket([at for at, _ in self.rows], tokens)
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

    A step: `per_step`(tokens) + layers x (`per_layer`(tokens) + attention + [experts] + [collectives])
    + `head`(sequences that are sampled from: all of them). Tokens are padded to the next CUDA-graph size
    where one exists. No CPU time is in here, and none of the gaps between kernels.
    """

    num_layers: int
    per_step: Curve  # embedding and final norm, over tokens
    per_layer: Curve  # everything of a layer that depends on the number of tokens alone
    head: Curve  # lm_head and sampler, over sequences
    attention: AttentionGrid
    experts: ExpertTable | None = None
    token_bytes: int = 0  # hidden_size x bytes per activation: what a collective moves for a token
    logits_bytes: int = 0  # a rank's share of one sequence's logits
    # Two all-reduces a layer, one after the embedding, and the logits gathered before sampling.
    tensor_link: Link | None = None
    expert_link: Link | None = None  # dispatch and combine around each MoE block (data parallel)
    graph_sizes: Sequence[int] = ()
    host_base_s: float = 0.0
    host_per_seq_s: float = 0.0
    _by_tokens: dict[int, float] = field(default_factory=dict, init=False)
    _by_seqs: dict[int, float] = field(default_factory=dict, init=False)

    def device_seconds(self, shape: StepShape) -> float:
        attention = self._attention_scale * self.attention.us(shape)
        if not shape.prefills:
            return self._fixed(shape.num_decodes, shape.num_decodes) + attention
        return self._fixed(shape.num_tokens, shape.num_seqs) + attention

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

    def lockstep_seconds(self, shapes: Sequence[StepShape]) -> float:
        """Device seconds of one step of data-parallel ranks that wait for each other at every MoE block.

        `shapes`: one per rank. Where all ranks run a CUDA graph they run the largest one's; the slowest
        rank's attention and head hold up the others. Source: vLLM 0.19 v1/worker/dp_utils.py,
        `coordinate_batch_across_dp`; forward_context.py, `DPMetadata`.
        """
        tokens = [self.padded(shape.num_tokens) for shape in shapes]
        largest = max(tokens)
        if self.graph_sizes and largest <= self.graph_sizes[-1]:
            tokens = [largest] * len(tokens)
        head = max(self._head_seconds(shape.num_seqs) for shape in shapes)
        attention = max(self.attention.us(shape) for shape in shapes)
        return self._token_seconds(largest, sum(tokens)) + head + self._attention_scale * attention

    def _fixed(self, tokens: int, seqs: int) -> float:
        by_tokens = self._by_tokens.get(tokens)
        if by_tokens is None:
            padded = self.padded(tokens)
            by_tokens = self._token_seconds(padded, padded) if tokens else 0.0
            self._by_tokens[tokens] = by_tokens
        by_seqs = self._by_seqs.get(seqs)
        if by_seqs is None:
            by_seqs = self._by_seqs[seqs] = self._head_seconds(seqs)
        return by_tokens + by_seqs

    def _head_seconds(self, seqs: int) -> float:
        """lm_head and sampler of `seqs` sequences, logits gathered from all tensor-parallel ranks."""
        if not seqs:
            return 0.0
        seconds = self.head(seqs) * US
        if self.tensor_link is not None:
            seconds += self.tensor_link.all_gather_s(seqs * self.logits_bytes)
        return seconds

    def _token_seconds(self, tokens: int, group_tokens: int) -> float:
        """Everything but attention and head: `tokens` on this rank, `group_tokens` on all that share experts."""
        layer = self.per_layer(tokens)
        if self.experts is not None:
            layer += self.experts.us(group_tokens)
            if self.expert_link is not None:
                # Hidden states and router logits (4 bytes an expert at most) out, hidden states back.
                routed = self.token_bytes + 2 * self.experts.num_experts
                layer += self.expert_link.all_gather_s(tokens * routed) / US
                layer += self.expert_link.all_gather_s(tokens * self.token_bytes) / US
        seconds = (self.per_step(tokens) + self.num_layers * layer) * US
        if self.tensor_link is not None:
            reduces = 2 * self.num_layers + 1
            seconds += reduces * self.tensor_link.all_reduce_s(tokens * self.token_bytes)
        return seconds
