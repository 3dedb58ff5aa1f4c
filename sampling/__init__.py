"""Step skipping: at which steps of a sampling run the model is computed, and how the other steps are extrapolated.

schedule   which of N steps are computed
reuse      rules that extrapolate the others
samplers   kinds of samplers, and the rule for each
task       a run before it begins
presets    what a user picks
run        one run, step by step
calibrate  a selection for the user's own model: `trial`, `paths`, `calibrated`; `saved` keeps it
block_caching  blocks inside of the network that computed steps reuse
measured   how close the presets came
metrics    how far a picture is from another
"""
