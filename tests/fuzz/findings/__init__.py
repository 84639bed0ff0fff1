"""What the fuzzer has found so far, at its smallest: programs and the plans on which they were wrong, or crashed, or hung."""

from .channels import OF_CHANNELS
from .models import OF_MODELS
from .stages import OF_STAGES
from .tiles import OF_TILES

FINDINGS = [*OF_TILES, *OF_MODELS, *OF_CHANNELS, *OF_STAGES]
"""Each with the layout that showed it."""
