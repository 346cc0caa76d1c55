"""The operators of torch that composer3d calls, or recognises, by name.

torch may change them without notice. If a test fails, read what calls the operator, then change
both.
"""

import ast
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.fsdp  # defines operators
from torch.distributed import _functional_collectives  # noqa: F401 (defines operators)

from composer3d.dryrun import collectives

_QUERY_KEY_VALUE = ("query", "key", "value")
_FORWARD = (*_QUERY_KEY_VALUE, "dropout_p", "is_causal")
_SAVED = ("grad_out", *_QUERY_KEY_VALUE, "out", "logsumexp")
_LENGTHS = ("cum_seq_q", "cum_seq_k", "max_q", "max_k")
_WINDOW = ("window_size_left", "window_size_right")


class Use(NamedTuple):
    """How composer3d calls an operator.

    Attributes:
        positional: the arguments that it gives by position.
        keywords: those that it gives by name.
        returns: how many results it reads, from the first.
        others: whether it leaves out further results.
    """

    positional: tuple[str, ...]
    keywords: tuple[str, ...]
    returns: int
    others: bool = False


# In parallel/context/kernels.py.
CALLED = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": Use(_FORWARD, ("attn_mask",), 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": Use(
        (*_SAVED, "dropout_p", "is_causal"), ("attn_mask",), 3
    ),
    "aten::_scaled_dot_product_flash_attention": Use(_FORWARD, (), 2, others=True),
    "aten::_scaled_dot_product_flash_attention_backward": Use(
        (*_SAVED, *_LENGTHS, "dropout_p", "is_causal", "philox_seed", "philox_offset"), (), 3
    ),
    "aten::_scaled_dot_product_cudnn_attention": Use(
        (*_QUERY_KEY_VALUE, "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal"),
        (),
        2,
        others=True,
    ),
    "aten::_scaled_dot_product_cudnn_attention_backward": Use(
        (
            *(*_SAVED, "philox_seed", "philox_offset", "attn_bias"),
            *(*_LENGTHS, "dropout_p", "is_causal"),
        ),
        (),
        3,
    ),
    "aten::_flash_attention_forward": Use(
        (*_QUERY_KEY_VALUE, *_LENGTHS, "dropout_p", "is_causal", "return_debug_mask"),
        _WINDOW,
        2,
        others=True,
    ),
    "aten::_flash_attention_backward": Use(
        (*_SAVED, *_LENGTHS, "dropout_p", "is_causal", "rng_state", "unused"), _WINDOW, 3
    ),
}

# Those of FSDP: a dry run knows what they read and write, or that it need not know.
FSDP = {
    "fsdp::all_gather_copy_in",
    "fsdp::chunk_cat",
    "fsdp::chunk_cat_mixed_dtype",  # from torch 2.15 on, in place of the former
    "fsdp::copy_",
    "fsdp::record_grad_output_stream",
    "fsdp::split_with_sizes_copy",
}


def schema_of(name: str) -> Any:
    """Return the schema of the operator without an overload's name."""
    namespace, _, operator = name.partition("::")
    found = getattr(getattr(torch.ops, namespace), operator, None)
    assert found is not None, f"torch {torch.__version__} has no operator {name}"
    return found.default._schema


@pytest.mark.parametrize("name", CALLED)
def test_torch_takes_the_arguments_that_are_passed(name: str) -> None:
    schema, use = schema_of(name), CALLED[name]
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    given = positional[: len(use.positional)]
    assert tuple(argument.name for argument in given) == use.positional, schema
    left = {argument.name: argument for argument in schema.arguments if argument not in given}
    assert set(use.keywords) <= set(left), schema
    for argument in left.values():
        assert argument.name in use.keywords or argument.has_default_value(), schema
    assert len(schema.returns) >= use.returns if use.others else len(schema.returns) == use.returns
    assert all(str(entry.type) == "Tensor" for entry in schema.returns[: use.returns]), schema
    # The logsumexp is read by its place.
    names = [entry.name for entry in schema.returns[:2]]
    if name.removesuffix("_backward") == name:
        assert names[0] == "output", schema
        assert names[1] in ("logsumexp", "softmax_logsumexp"), schema


def test_no_other_operator_is_called_by_name(root: Path) -> None:
    called = set()
    for path in (root / "composer3d").rglob("*.py"):
        tree = ast.parse(path.read_text())
        # Names of namespaces, such as ``_aten = torch.ops.aten``.
        namespaces = {
            ast.unparse(target): ast.unparse(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and _is_namespace(node.value)
            for target in node.targets
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                whole = ast.unparse(node.value)
                namespace = namespaces.get(whole, whole)
                is_own = namespace.startswith("torch.ops.composer3d")
                if namespace.startswith("torch.ops.") and namespace.count(".") == 2 and not is_own:
                    called.add(f"{namespace.removeprefix('torch.ops.')}::{node.attr}")
    assert called == set(CALLED)


def _is_namespace(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.ops"


def test_a_dry_run_knows_the_operators_of_fsdp() -> None:
    names = torch._C._dispatch_get_all_op_names()
    assert {name for name in names if name.startswith("fsdp::")} <= FSDP
    arguments = [argument.name for argument in schema_of("fsdp::all_gather_copy_in").arguments]
    assert arguments[1] == "all_gather_output"
    for name in FSDP & set(names) & {"fsdp::chunk_cat", "fsdp::chunk_cat_mixed_dtype"}:
        assert schema_of(name).arguments[-1].name == "out"
    assert schema_of("fsdp::split_with_sizes_copy").arguments[-1].name == "out"


@pytest.mark.parametrize(
    ("namespace", "table"),
    [("c10d", collectives._OF_GROUPS), ("_c10d_functional", collectives._FUNCTIONAL)],
    ids=["c10d", "functional"],
)
def test_collectives_have_their_tensors_and_their_group_where_they_are_read(
    namespace: str, table: dict[str, Any]
) -> None:
    for name, kind in table.items():
        schema = schema_of(f"{namespace}::{name}")
        part = str(schema.arguments[kind.part].type)
        assert part in ("Tensor", "List[Tensor]", "List[List[Tensor]]"), schema
        group = "process_group" if namespace == "c10d" else "group_name"
        assert group in [argument.name for argument in schema.arguments], schema
