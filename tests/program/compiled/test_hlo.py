"""The text of compiled programs: shapes in bytes, and what an instruction holds."""

import pytest

from braidax.program.compiled.hlo import Module, elements, num_bytes

TEXT = """HloModule m, num_partitions=2

%inner (a: f32[2,2], b: f32[2,2]) -> f32[2,2] {
  %a = f32[2,2]{1,0} parameter(0)
  %b = f32[2,2]{1,0} parameter(1)
  ROOT %product = f32[2,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[2,2]) -> f32[2,2] {
  %x = f32[2,2]{1,0:T(8,128)} parameter(0)
  %both = (f32[2,2]{1,0}, s32[]) custom-call(%x, /*index=1*/%x), custom_call_target="__cublas$gemm"
  %sorted = f32[2,2]{1,0} custom-call(%x), custom_call_target="Sort"
  ROOT %fused = f32[2,2]{1,0} fusion(%x, %sorted), kind=kOutput, calls=%inner
}
"""


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[2,3]{1,0}", 24), ("bf16[8]{0:T(8,128)(2,1)S(1)}", 16), ("pred[3]", 3), ("s4[5]{0}", 3), ("f32[]", 4),
        ("f8e4m3fn[16]{0}", 16), ("c64[2]", 16), ("token[]", 0), ("(f32[2]{0}, (u32[], s8[4]{0}))", 16),
    ],
)  # fmt: skip
def test_sizes_of_shapes(shape: str, size: int) -> None:
    assert num_bytes(shape) == size


def test_elements_of_shapes() -> None:
    assert elements("f32[2,3]{1,0}") == ["f32[2,3]{1,0}"]
    nested = "((f32[2,3]{1,0}, s32[]), bf16[4]{0:T(8,128)})"
    assert elements(nested) == ["(f32[2,3]{1,0}, s32[])", "bf16[4]{0:T(8,128)}"]


def test_products_are_found_in_libraries_and_in_what_is_run() -> None:
    module = Module(TEXT)
    assert module.num_devices == 2
    found = {one.name: module.multiplies(one) for one in module.entry.instructions}
    assert found == {"x": False, "both": True, "sorted": False, "fused": True}
    assert module.entry.instructions[1].operands == ("x", "x")
    assert module.entry.root.name == "fused"
