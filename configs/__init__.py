"""Values only: models, engines and meshes as functions that return frozen dataclasses."""
