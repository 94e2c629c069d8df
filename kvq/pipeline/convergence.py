"""Whether more data would have changed the maxima: when each was raised last."""

from kvq.state import Calibration


def convergence(calibration: Calibration) -> str | None:
    """Return one sentence on when the maxima were reached; None where that is not recorded."""
    plan = calibration.run.get("batch_plan", {})
    raised = [
        (number, -layer.layer_idx, quantizer.removesuffix("_bmm_quantizer"))
        for layer in calibration.layers
        if layer.shared_from is None
        for quantizer, number in layer.raised.items()
    ]
    if not raised or not plan:
        return None
    count = plan["batches"]
    early = sum(number < count / 2 for number, _, _ in raised)
    last, layer, side = max(raised)
    return (
        f"convergence: {early} of {len(raised)} maxima were reached in the first half of the "
        f"{count} batches, the last one (layer {-layer}, {side}) in batch {last + 1}"
    )
