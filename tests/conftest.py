"""Every test runs on eight simulated devices, chosen before JAX starts."""
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
