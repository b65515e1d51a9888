"""How bytes move between the engine's memory and staging.

The only place, with the builder of a geometry, that imports torch.
"""
