"""How far from one device a layout may be: the one table.

Error is max|a − b| / max|reference| over all logits of a case. In float32 only the order of sums differs. In
bfloat16 each rounding is 2⁻⁹ relative, and there are a few dozen between a token and its logits. With an int8
cache a number that lies within the order of sums of the middle between two steps may be rounded to either:
one number of a key or value then moves by 1/127 of its head's largest. Where the reference's two best logits
are closer than twice the tolerance, either may win: such positions are ties, and are counted.

Worked example: tolerance 1e-5 and logits up to 20: two best logits less than 4e-4 apart are a tie.
"""

TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-2}
CACHE_TOLERANCE = {"auto": 0.0, "int8": 1e-2}


def tolerance(activation_dtype: str, reduce_dtype: str, kv_cache_dtype: str) -> float:
    """Of a case: the widest of what its activations, its reductions and its cache allow."""
    return max(TOLERANCE[activation_dtype], TOLERANCE[reduce_dtype], CACHE_TOLERANCE[kv_cache_dtype])
