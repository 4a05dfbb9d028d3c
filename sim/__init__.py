"""The simulated world: a SimPy clock, two device groups and models of cost, acceptance, load and failure.

Import as `minedraft.sim.…`. Only `minedraft.sim.backend` needs SimPy; the models are plain Python and numpy.
"""
