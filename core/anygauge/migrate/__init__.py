"""Scripts and configs of other projects: their arguments as keys of anygauge. Nothing of them is executed."""
