"""The rules of dispatch."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.dispatch import Implementation, Operation, added_implementation, default_implementation


def test_dispatch_goes_on_and_reports_every_failure():
    def cannot(x):
        raise NotImplementedError(f"got {x}, expected 0")

    def broken(x):
        raise ValueError("a bug is not a reason to go on")

    falls_through = Operation("op", {"a": Implementation(cannot), "xla": Implementation(lambda x: x + 1)})
    assert falls_through.run(1) == 2
    with pytest.raises(NotImplementedError, match="op: 'a' cannot run: got 1, expected 0"):
        falls_through.run(1, implementation="a")
    none = Operation("op", {"a": Implementation(cannot), "b": Implementation(cannot, ("tpu",))})
    with pytest.raises(ExceptionGroup, match="op: no implementation can run on platform='cpu'") as caught:
        none.run(1, platform="cpu")
    assert len(caught.value.exceptions) == 2
    with pytest.raises(ValueError, match="a bug"):
        Operation("op", {"a": Implementation(broken), "xla": Implementation(cannot)}).run(1)


def test_a_kernel_is_traced_once_for_all_layers_that_call_it_alike():
    """Arrays may differ; shapes, dtypes, and the type and value of everything else are what a call is known by."""
    traced = []

    def kernel(x, rows, *, factor):
        traced.append((rows["a"].shape, factor))
        return x * factor + rows["a"].sum()

    op = Operation("op", {"kernel": Implementation(kernel, ("cpu",)), "xla": Implementation(kernel)})

    def layers(x, rows, implementation, factors):
        for factor in factors:
            x = op.run(x, rows, factor=factor, implementation=implementation, platform="cpu")
        return x

    x, rows = jnp.arange(4.0), {"a": jnp.ones(3)}
    plain = jax.jit(lambda x, rows: layers(x, rows, "xla", (2, 2.0, 2)))(x, rows)
    assert len(traced) == 3
    traced.clear()
    shared = jax.jit(lambda x, rows: layers(x, rows, "kernel", (2, 2.0, 2)))(x, rows)
    assert [type(factor) for _, factor in traced] == [int, float]
    assert (shared == plain).all() and (layers(x, rows, "kernel", (2, 2.0, 2)) == plain).all()
    traced.clear()
    jax.jit(lambda x, rows: layers(x, rows, "kernel", (2,)))(x, {"a": jnp.ones(5)})
    assert traced == [((5,), 2)]


def test_an_added_implementation_comes_first_and_only_within_its_context():
    op = Operation("page_score", {"a": Implementation(lambda x: x + 1), "xla": Implementation(lambda x: x)})
    program = jax.jit(op.run)
    assert program(1) == 2
    with added_implementation("page_score", "mine", Implementation(lambda x: x + 10)):
        assert program(1) == 11 and op.run(1, implementation="a") == 2 and op.resolve(1) == "mine"
        assert Operation("other", op.implementations).run(1) == 2
        with added_implementation("page_score", "later", Implementation(lambda x: x, ("tpu",))):
            assert [*op.table] == ["later", "mine", "a", "xla"] and op.resolve(1, platform="cpu") == "mine"
        with added_implementation("page_score", "a", Implementation(lambda x: x + 7)):
            assert [*op.table] == ["a", "mine", "xla"] and program(1) == 8
        with default_implementation("xla"):
            assert program(1) == 1
    assert program(1) == 2 and [*op.table] == ["a", "xla"]
    with pytest.raises(ValueError, match="implementation='mine' is unknown"):
        op.run(1, implementation="mine")
    with pytest.raises(ValueError, match="unknown operation 'pagescore', did you mean 'page_score'"):
        with added_implementation("pagescore", "mine", Implementation(lambda x: x)):
            pass
