"""The shapes at which `gather_attention` is timed: lists of a retrieval method at 128K tokens.

L of S tokens are listed in K pages of P; P = 1: slots. The lists are for F heads: one for all, or one for each.
"""

from pallas_kernels.formats.shapes import CONTEXT, Sizes, Timed, counted, few, frequencies, full, lists, normal, rounded


def label(n: Sizes) -> str:
    """Name a shape."""
    if n.kind is not None:
        return f"{n.K} of {n.S} tokens in {n.kind} per KV head"
    rows, heads = f"{n.B} row{'s' * (n.B > 1)}", "for all heads" if n.F == 1 else "per KV head"
    if n.P > 1:
        return f"{n.K} pages of {n.P} {heads} of {n.S} tokens, {rows}"
    return f"{n.K} of {n.S} tokens {heads}{', rotated on read' * n.rotate}, {rows}"


def listed_bytes(n: Sizes) -> int:
    """Count the bytes of the listed keys and values: bfloat16, or codes of 8 bits and a scale for each."""
    return 2 * n.B * n.H * n.K * n.P * (n.D * 2 if n.kind is None else n.D + 2)


TIMED = Timed(
    label=label,
    sizes={"S": CONTEXT, "L": 2048, "P": 1, "F": lambda n: n.H, "rotate": False, "kind": None}
    | {"K": lambda n: max(1, n.L // n.P), "N": lambda n: n.S // n.P},
    shapes=({}, {"B": 8}, {"P": 16}, {"P": 32, "F": 1}, {"L": 2688, "F": 1, "rotate": True}, {"kind": "int8"}),
    tiny={"S": few, "L": few},
    arrays={
        "query": normal("B H G D"),
        "key": rounded("B H S D"),
        "value": rounded("B H S D"),
        "slots": lists("B F K", "N"),
        "mask": full("B F K", True, bool),
        "position": lambda d: counted("B H S")(d) if d.P > 1 else None,
        "place": lambda d: counted("B F K")(d) if d.rotate else None,
        "inv_freq": lambda d: frequencies(d) if d.rotate else None,
    },
    options=lambda n: {"scale": n.scale, "page_size": n.P},
    reads=listed_bytes,
)
