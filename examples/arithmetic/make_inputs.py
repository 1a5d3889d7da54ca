"""Make the inputs of ``examples/arithmetic_*.toml``, as ``anygauge demo`` does: ``anygauge.cli.demo.inputs``.

python examples/arithmetic/make_inputs.py --seed 0 --out runs/arithmetic-inputs
"""

from anygauge_cpu.env import prepare_imports

if __name__ == "__main__":
    prepare_imports()  # transformers imports what lies beside torch, and that may not fit it
    from anygauge.cli.demo.inputs import main

    main()
