"""Whether more data would have changed the maxima: when each was raised last."""

from kvq.state import Calibration


def convergence(calibration: Calibration) -> tuple[str, ...]:
    """Return one sentence on when the maxima were reached, and one on an early end asked for."""
    raised = [
        (number, -layer.layer_idx, quantizer.removesuffix("_bmm_quantizer"))
        for layer in calibration.layers
        if layer.shared_from is None
        for quantizer, number in layer.raised.items()
    ]
    planned, count = calibration.batches, calibration.batches_run
    if "merged" in calibration.data:
        return ("convergence: unknown, merged calibrations have no order of batches in common",)
    if not raised or planned is None or count is None:
        return ("convergence: not recorded by the version of kvq that calibrated",)
    early = sum(number < count / 2 for number, _, _ in raised)
    last, layer, side = max(raised)
    reached = (
        f"convergence: {early} of {len(raised)} maxima were reached in the first half of the "
        f"{count} batches, the last one (layer {-layer}, {side}) in batch {last + 1}"
    )
    if count < planned:
        end = f"stopped after {count} of {planned} batches: the second half raised no maximum"
    elif calibration.run.get("stop_when_stable"):
        end = f"not stopped early: all {planned} batches were run"
    else:
        return (reached,)
    return reached, end
