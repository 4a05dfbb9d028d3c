"""The experiments of the MineDraft paper (arXiv 2603.18016v1), simulated: `minedraft reproduce paper`.

* `published`: the paper's figures, and nothing of ours;
* `setup`: which models, GPUs, requests and acceptance a setting of the paper means here;
* `stages`: seconds of a verification, of drafting and of a prompt in a setting;
* `plugin_world`: a world that stalls where the authors' plugin does;
* `trial`, `bench`: one simulated run of the paper's, and many of them;
* `calibration`: the few numbers that are fitted, and to what;
* `claims_*`: one group of claims each, as lines of `verdict`.

Law of this package: a figure of ours comes from a run of the simulator or from `minedraft.theory`, made in the very
invocation that prints it. What is typed in is the paper's, or an input that says so (`sim/data/paper.toml`).
"""
