"""What a compiled program sends: kinds, bytes, and how often."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.collectives import Collective, collectives
from fp4jax import sharding


def compiled(function, x, spec):
    with jax.set_mesh(mesh := sharding.make_mesh(data=2, fsdp=4)):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        return jax.jit(function).lower(placed).compile().as_text()


def test_a_gather_in_a_loop_counts_every_turn():
    def function(x):
        def body(carry, row):
            whole = lax.with_sharding_constraint(row, P())
            return carry + whole, None

        return lax.scan(body, jnp.zeros(8), x)[0]

    found = list(collectives(compiled(function, jnp.ones((5, 8)), P(None, "fsdp"))))
    assert found == [
        Collective("all-gather", (("f32", (1, 8)),), devices=(0, 1, 2, 3), times=5)
    ]
    assert found[0].bytes == 32


def test_a_sum_over_all_devices():
    found = list(collectives(compiled(jnp.sum, jnp.ones(16), P(("data", "fsdp")))))
    assert found == [
        Collective("all-reduce", (("f32", ()),), devices=tuple(range(8)), times=1)
    ]


def test_of_a_conditional_the_branch_that_sends_the_most_counts():
    branches = """
%least (p: f32[4]) -> f32[4] {
  ROOT %a = f32[4] all-reduce(%p), replica_groups={}
}
%most (p: f32[4]) -> f32[4] {
  %g = f32[16] all-gather(%p), replica_groups={}
  ROOT %s = f32[4] slice(%g)
}
ENTRY %main (i: s32[], p: f32[4]) -> f32[4] {
  ROOT %c = f32[4] conditional(%i, %p, %p), """
    expected = [Collective("all-gather", (("f32", (16,)),), devices=(), times=1)]
    for which in (
        "branch_computations={%least, %most}",
        "true_computation=%most, false_computation=%least",
    ):
        assert list(collectives(f"{branches}{which}\n}}\n")) == expected


def test_an_asynchronous_start_counts_its_result():
    hlo = """
ENTRY %main (p: u8[4,8]) -> u8[16,8] {
  %s = (u8[4,8], u8[16,8]) all-gather-start(%p), replica_groups=[2,4]<=[4,2]T(1,0)
  ROOT %d = u8[16,8]{1,0} all-gather-done(%s)
}
"""
    (found,) = collectives(hlo)
    assert found == Collective(
        "all-gather", (("u8", (16, 8)),), devices=(0, 2, 4, 6), times=1
    )


def test_a_ragged_exchange_counts_an_equal_share_of_its_room():
    room, sizes = "bf16[40,16,128]{2,1,0}", "s64[8]{0}, s64[8]{0}, s64[8]{0}"
    start = f"(({room}, {room}, {sizes}, /*index=5*/s64[8]{{0}}), {room})"
    how = "(%p, %z, %a, %b, %c, /*index=5*/%d), replica_groups={{0,2,4,6}}"
    hlo = f"""
ENTRY %main (p: bf16[40,16,128]) -> bf16[40,16,128] {{
  %r = {room} ragged-all-to-all{how}
  %s = {start} ragged-all-to-all-start{how}
  ROOT %e = {room} ragged-all-to-all-done(%s)
}}
"""
    found = list(collectives(hlo))
    assert found == 2 * [
        Collective(
            "ragged-all-to-all",
            (("bf16", (40, 16, 128)),),
            devices=(0, 2, 4, 6),
            times=1,
        )
    ]
    assert found[0].bytes == 2 * 40 * 16 * 128 // 4
