"""Pipeline parallelism: the layers are cut over ``mesh.pp`` ranks. Begin with ``runtime``."""
