"""What keeps a poor curvature from doing harm."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guards:
    """What keeps a poor curvature from doing harm.

    Attributes:
        warmup_steps: No correction up to this update: while the rate rises, old pairs tell little.
        min_pairs: Pairs that a group needs before it is corrected.
        ramp_steps: Updates over which the correction then rises from 0 to its full size.
        trust_radius: Largest correction of a group as a fraction of its gradient.
        min_cosine: Smallest cosine between a group's gradient as it is and as the correction, not yet cut to the
            trust radius, would make it; below that it stays as it is.
    """

    warmup_steps: int = 0
    min_pairs: int = 200
    ramp_steps: int = 500
    trust_radius: float = 0.5
    min_cosine: float = 0.5
