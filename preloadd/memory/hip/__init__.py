"""Memory of AMD GPUs through HIP. Tested against a stand-in library only, never on hardware."""
