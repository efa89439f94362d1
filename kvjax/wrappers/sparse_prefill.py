"""Sparse prefill: `Prefill` gives any method that keeps slots sparse attention over the prompt."""

from typing import Any, ClassVar

from kvjax.attention.patterns import Pattern, check_pattern, check_table_sizes, heads_of, is_table
from kvjax.attention.sparse import SparsePrompt
from kvjax.protocol.method import LayerMethod
from kvjax.protocol.slots import SlotMethod
from kvjax.protocol.typing import Model, pytree, static
from kvjax.wrappers.compose import Around, answers, inner_of_layer, passes, slot_method


@answers("method")
@pytree
class Prefill(Around):
    """Prefill sparsely, by a pattern of each query head, and decode as ``method`` does.

    Example: ``Prefill(method=Quest(budget=1024), pattern=kvjax.wrappers.patterns("best_pattern.json", config))``.

    The prompt is prefilled in chunks of at most ``chunk`` tokens. In a chunk each query head attends to some of the tokens
    up to each query's own, by its pattern (`Pattern`), in blocks of ``block`` tokens. Every block attends to itself,
    and to

    * "vertical_slash": the ``columns`` keys, and the ``diagonals`` distances between query and key, with the largest sums of
      attention from the chunk's last ``window`` queries, whose softmax is over all keys. The first ``num_sink`` keys and the
      ``num_recent`` shortest distances are always among them. A block that a selected diagonal passes through is read whole.
    * "a_shape": the first ``columns`` keys, and the blocks of the ``diagonals`` newest tokens.
    * "block_sparse": for each block of queries the best blocks of keys by the product of the means, ``blocks`` with its own.
    * "xattention": for each block of queries the first block, its own, and then the fewest best blocks of keys with which it
      has ``share`` of the attention. Blocks are scored by sums along pieces of antidiagonals: ``stride`` queries in a row
      are one vector, ``stride`` keys, the last one first, are another, and the softmax is over these vectors.
    * "flexprefill": the columns of "vertical_slash", and separately its diagonals, as many as have ``share`` of the attention
      from the window, at least ``min_budget`` of each. Or blocks, where they describe the head better: where the attention
      of the window's mean query to the mean keys of blocks is near to the window's attention. The distance is the root of
      the Jensen-Shannon divergence, and must be below ``tau``. Then each block of queries reads the first block, its own, and
      the best by the softmax of the product of means. The best are as many as have ``share`` of the sum over all blocks of
      queries of the chunk, and at least ``min_budget`` tokens for each block of queries.

    * "blasst": for each 64 queries their own block of 192 keys, the first, and those that flash attention may not skip: read
      from the last one back, a block is skipped if each query's largest logit in it is below its largest one so far by more
      than the log of the text's tokens over ``factor``.

    The work of the last three patterns depends on the text: the kernel's time does, but the lists of the first two have
    room for everything. "blasst" has no lists; only a Hopper GPU skips its blocks, elsewhere it takes longer than a dense
    prompt. Lists take 4 * N * P bytes per query head, N blocks of queries in a chunk and P of keys in the cache. In blocks
    of 128 tokens this is 8 MiB for 32 query heads and a prompt of 128K tokens in chunks of 8192, and 32 MiB in chunks of
    32768. The scores are as large. "xattention" also holds up to 64 MiB of sums and as much of logits, "flexprefill" lists
    of 128K columns, 16 MiB.

    One pattern serves all heads, or each query head of each layer has its own: `patterns` reads them from a file, and
    ``python -m experiments.heads.patterns`` measures which pattern suits which head of a model. A prompt that fits into
    every pattern is prefilled densely, by the same kernel as without this wrapper. A question (`kvjax.extend`) and decode
    steps attend as under ``method``; nothing is stored for the pattern.

    ``method`` is one that chooses slots of a `LayerCache`; it may weigh or estimate tokens too (`MagicPIG`, `RetroInfer`).
    Two kinds of methods are refused when the wrapper is made (ValueError): methods with storage, positions or a prefill of
    their own (`ShadowKV`, `MosaicKV`, `NTK`, `TokenSelect`, `KeyDiff`), and methods that need the attention of the whole
    prompt (`H2O`, `ObservedAttention`). Only `PerLayer` and `LayerBudgets` can be around this wrapper.

    **Source**: Jiang et al., "MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse Attention"
    (arXiv:2407.02490); microsoft/MInference fb56c91 for the sizes, the entries that are always read, and the default pattern.
    Xu et al., "XAttention: Block Sparse Attention with Antidiagonal Scoring" (arXiv:2503.16428); mit-han-lab/x-attention
    e379887 for the scale of the scores and the entries that are always read. Lai et al., "FlexPrefill: A Context-Aware Sparse
    Attention Mechanism for Efficient Long-Sequence Inference" (arXiv:2502.20766); ByteDance-Seed/FlexPrefill a24b27b for the
    sizes. XAttention and FlexPrefill use blocks of 128 tokens, so ``block=128``, and FlexPrefill's window is a block,
    ``window=128``.

    "BLASST: Dynamic BLocked Attention Sparsity via Softmax Thresholding" (arXiv:2512.12087), whose threshold is inverse to
    the length; 1000 is TensorRT-LLM's example of a factor for prompts.

    **Departures**: diagonals are widened to blocks that begin at multiples of ``block``; the released kernel begins them at
    the diagonal. For a diagonal without neighbours it reads one block, and this kernel two. With "block_sparse" the own
    block is always among the best. The released code prefills a prompt at once, so that the last queries of the prompt
    choose for the whole prompt; here the last queries of each chunk choose for their chunk. Where a chunk is shorter than the
    window all of its queries vote.

    BLASST's blocks are those of the kernel that skips them, whatever ``block`` is, and it reads them from the last one back;
    the first block is never skipped. Beside heads of other patterns it computes for all heads. On Qwen2.5-Coder-1.5B a factor
    of 200 lost 1 % of the attention at 2K to 16K, 1000 lost 3 to 4 % and no points (docs/notebook/reachable.md).

    Of equally heavy entries that a share needs, all are taken. XAttention's code has one ``share`` for each head of
    Llama-3.1-8B, by its dynamic programme; here `Pattern` takes one for each head, and nothing finds them.
    FlexPrefill's code counts single columns and diagonals, but selects blocks of them; here single ones are selected. With
    "flexprefill" too, ``num_sink`` and ``num_recent`` are always read, and count towards the share; the code keeps the first
    block of columns and the own block. The code reads blocks by the window's columns and diagonals in addition to the blocks
    of the share; here these are the best ones of each block of queries. All blocks of queries share one sum within a chunk,
    not within the prompt.
    """

    PAPER: ClassVar[str] = "arXiv:2407.02490"

    pattern: Any = static("a `Pattern`, or one for each query head of each layer; a file in commands", default=Pattern())
    window: int = static("last queries of a chunk, which choose columns and diagonals", default=64, least=1)
    num_sink: int = static("first tokens that are always columns", default=30, least=0)
    num_recent: int = static("shortest distances that are always diagonals", default=100, least=1)
    block: int = static("tokens of a block; kernels take powers of two from 16 to 128", default=64, least=1)
    stride: int = static('tokens of an antidiagonal\'s piece under "xattention", which divides block', default=8, least=1)
    chunk: int = static("prompt tokens that choose together, a multiple of block", default=32768, least=1)

    keeps = "what `method` keeps"
    dense_prompt = False
    slot_block = None  # columns and diagonals are chosen among the keys of all devices

    compress = passes("method", SlotMethod.compress)
    gap = passes("method", SlotMethod.gap)
    select = passes("method", SlotMethod.select)
    update = passes("method", SlotMethod.update)
    count = passes("method", SlotMethod.count)
    counters = passes("method", SlotMethod.counters)
    source = passes("method", SlotMethod.source)
    signal = passes("method", SlotMethod.signal)
    with_signal = passes("method", SlotMethod.with_signal)
    reread_tokens = passes("method", SlotMethod.reread_tokens)
    reread = passes("method", SlotMethod.reread)
    due = passes("method", SlotMethod.due)
    excerpt = passes("method", SlotMethod.excerpt)
    rework = passes("method", SlotMethod.rework)
    settle = passes("method", SlotMethod.settle)
    bounded_slots = passes("method", SlotMethod.bounded_slots)

    def check(self) -> None:
        method = slot_method("Prefill: method", self.method, weighs=True)
        if method.reads.mass:
            raise ValueError(
                f"Prefill: {type(method).__name__} needs the attention of the whole prompt, which a sparse prompt lacks"
            )
        check_pattern("Prefill", self.pattern)
        if self.chunk % self.block:
            raise ValueError(f"Prefill: chunk must be a multiple of block={self.block} tokens, got {self.chunk}")
        if self.block % self.stride and any(head.kind == "xattention" for head in heads_of(self.pattern)):
            raise ValueError(f"Prefill: block must be a multiple of stride={self.stride} tokens, got {self.block}")

    def check_sizes(self, model: Model) -> None:
        if is_table(self.pattern):
            check_table_sizes("Prefill", self.pattern, model)

    @property
    def sparse_prompt(self) -> SparsePrompt:
        heads = self.pattern if isinstance(self.pattern, tuple) else (self.pattern,)
        return SparsePrompt(heads, self.window, self.num_sink, self.num_recent, self.block, self.stride)

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        knobs = {name: vars(self)[name] for name in ("window", "num_sink", "num_recent", "block", "stride", "chunk")}
        if is_table(self.pattern) and len(self.pattern) != num_layers:
            raise ValueError(
                f"Prefill: pattern must have patterns for each of the model's {num_layers} layers, got {len(self.pattern)}"
            )
        pattern = self.pattern[layer] if is_table(self.pattern) else self.pattern
        return Prefill(method=inner_of_layer(self.method, layer, num_layers), pattern=pattern, **knobs)

    def max_tokens(self, in_prompt: bool) -> int | None:
        return self.chunk if in_prompt else self.method.max_tokens(in_prompt)
