"""Compile decoder layers around the attention that kvq observes.

The graph of a layer breaks at its attention and nowhere else, so that one compiled layer serves all
of its kind: norms, residual sums and the elementwise part of the MLP fuse. Attention knows its
layer's number and would be compiled for each; inside of it, norms and rotation are compiled alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType

import torch
from torch import Tensor, nn

from kvq.calibration.batches import Sequence as TokenSequence
from kvq.calibration.watch import hooked_modules
from kvq.errors import InputError, UnsupportedModelError, first_line

MAX_SHAPES = 4  # of batches; each is compiled for by itself
_ROTATION = "apply_rotary_pos_emb"  # as the attention of transformers' models calls it
_REASON = "kvq observes this module"
# nothing is chosen by measured speed, and what is fused rounds where it would unfused
_OPTIONS = {"deterministic": True, "emulate_precision_casts": True}

Run = Callable[[Mapping[str, Tensor]], None]


def check_shapes(sequences: Sequence[TokenSequence], plan: Sequence[Sequence[int]]) -> None:
    """Refuse a plan for which compiling would take longer than it saves.

    Raises:
        InputError: its batches have too many shapes.
    """
    shapes = {(len(batch), sequences[batch[0]].lengths) for batch in plan}
    if len(shapes) > MAX_SHAPES:
        raise InputError(
            f"--compile compiles for each shape of batches, and there are {len(shapes)}, expected "
            f"at most {MAX_SHAPES}",
            code="option.compile",
            hint="--pack makes sequences of one length; or leave --compile out",
        )


@contextmanager
def compiled(model: nn.Module, modules: Mapping[str, nn.Module], run: Run) -> Iterator[Run]:
    """Yield what runs a batch with the layers around `modules` compiled inside the block.

    Rounding differs from that of uncompiled layers, if little, but not from run to run.

    Args:
        model: a transformers model.
        modules: attention path → the module of `model` that is observed.
        run: runs a batch of inputs under observation.

    Raises:
        UnsupportedModelError: when running, a layer cannot be compiled as a whole.
    """
    import torch._inductor.config as inductor
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._dynamo.utils import counters

    if not hasattr(inductor, "deterministic"):
        raise UnsupportedModelError(
            f"torch {torch.__version__} cannot compile so that two runs give the same bytes",
            code="calibrate.compile",
            hint="torch 2.11 can; or leave --compile out",
        )

    def run_compiled(inputs: Mapping[str, Tensor]) -> None:
        before = counters["graph_break"].copy()
        try:
            run(inputs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            raise _not_compiled(model, first_line(error)) from error
        broken = [why for why in counters["graph_break"] - before if _REASON not in why]
        if broken:  # what follows a break may have run uncompiled
            raise _not_compiled(model, broken[0].splitlines()[0])
        if not counters["stats"]["unique_graphs"]:
            raise _not_compiled(model, "torch has compiled nothing; variables may tell it so")

    with ExitStack() as stack:
        for module in hooked_modules(model, modules):
            stack.callback(setattr, module, "_compiled_call_impl", None)
            module._compiled_call_impl = torch.compiler.disable(module._call_impl, reason=_REASON)
        for module in [*_layers(model, modules), *_inner_norms(modules)]:
            stack.callback(setattr, module, "_compiled_call_impl", None)
            module.compile(dynamic=False, options=_OPTIONS)
        for module in modules.values():
            stack.enter_context(_compiled_rotation(module))
        limit = 8 * MAX_SHAPES  # of graphs for one function; beyond it, torch would not compile
        stack.enter_context(config.patch(
            fail_on_recompile_limit_hit=True, recompile_limit=limit, suppress_errors=False
        ))  # fmt: skip
        yield run_compiled


def _inner_norms(modules: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return the norms inside of `modules` that nothing looks at, such as those of Q and K."""
    return [
        inner
        for module in modules.values()
        for inner in module.modules()
        if type(inner).__name__.endswith("Norm") and not inner._forward_hooks
    ]


@contextmanager
def _compiled_rotation(module: nn.Module) -> Iterator[None]:
    """Give a module a forward of its own that calls the compiled rotation, if it calls one."""
    forward = type(module).forward
    code = getattr(forward, "__code__", None)
    if "forward" in vars(module) or code is None or _ROTATION not in code.co_names:
        yield
        return
    scope = dict(forward.__globals__)
    scope[_ROTATION] = torch.compile(scope[_ROTATION], dynamic=False, options=_OPTIONS)
    own = FunctionType(code, scope, code.co_name, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(own, module)
    try:
        yield
    finally:
        del module.forward


def _layers(model: nn.Module, modules: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return the layers that hold `modules`: what a number names on the way to each."""
    names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    found: dict[str, None] = {}
    for path, module in modules.items():
        parts = names[id(module)].split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if number is None or number == len(parts) - 1:
            raise _not_compiled(model, f"`{path}` is not inside of a layer")
        found[".".join(parts[: number + 1])] = None
    return [model.get_submodule(name) for name in found]


def _not_compiled(model: nn.Module, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the layers of `{type(model).__name__}` cannot be compiled: {why}",
        code="calibrate.compile",
        hint="leave --compile out",
    )
