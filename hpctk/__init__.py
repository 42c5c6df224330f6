from hpctk._version import __version__ as __version__
