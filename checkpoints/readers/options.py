"""What a reader cannot see in a file and a person has to say."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ReaderOptions:
    """Choices beside the file; None where it is left to the file.

    Attributes:
      gamma_offset: for PaLM-rlhf-pytorch, 0 where the stored norm gain acts as itself (releases up to
        0.2.3) and 1 where it acts as 1 + gain (0.2.4 and later); names and shapes are the same.
      dim_head: the width of a head, for files that have two readings without it (PaLM-jax's leaves).
    """

    gamma_offset: int | None = None
    dim_head: int | None = None
