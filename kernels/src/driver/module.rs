//! Kernels: a module of PTX that the driver compiled, and its functions.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use super::device::Context;
use super::error::{CudaError, dropped};
use super::library::Handle;
use super::memory::invalid;
use super::stream::Stream;

/// A loaded module. Clones share it; the last one, or the last [`Function`] of it, unloads it.
#[derive(Clone, Debug)]
pub struct Module {
    loaded: Arc<Loaded>,
}

struct Loaded {
    context: Context,
    module: Handle,
}

impl std::fmt::Debug for Loaded {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Loaded").field("context", &self.context).finish_non_exhaustive()
    }
}

/// A kernel. Launching it is the caller's promise about its arguments.
#[derive(Clone, Debug)]
pub struct Function {
    function: FunctionHandle,
    module: Module,
}

#[derive(Clone, Copy)]
struct FunctionHandle(Handle);

impl std::fmt::Debug for FunctionHandle {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("FunctionHandle")
    }
}

impl Module {
    /// Loads the text `ptx`, which the driver compiles for the GPU and keeps in its cache.
    ///
    /// # Errors
    /// When the text is no PTX, or of a version that this driver is too old for (code 222).
    pub fn load(context: &Context, ptx: &str) -> Result<Module, CudaError> {
        if ptx.starts_with("\x7fELF") {
            return Err(invalid("cuModuleLoadData"));
        }
        let text = CString::new(ptx).map_err(|_| invalid("cuModuleLoadData"))?;
        // SAFETY: the image is a text with its end. The driver takes an image for compiled code,
        // and trusts the lengths in it, only by its first bytes: those of ELF were refused above,
        // and those of NVIDIA's own kind are no UTF-8.
        unsafe { Self::load_bytes(context, text.as_bytes_with_nul()) }
    }

    /// Loads the compiled image `cubin`, as a cache of compiled kernels keeps it.
    ///
    /// # Errors
    /// When the driver refuses it, for example because it was compiled for another GPU.
    ///
    /// # Safety
    /// The image must be whole: the driver trusts the lengths that are written in it.
    pub unsafe fn load_cubin(context: &Context, cubin: &[u8]) -> Result<Module, CudaError> {
        // SAFETY: the caller promises a whole image.
        unsafe { Self::load_bytes(context, cubin) }
    }

    /// # Safety
    /// `image` is a text with its end, or a whole compiled image.
    unsafe fn load_bytes(context: &Context, image: &[u8]) -> Result<Module, CudaError> {
        let _entered = context.enter()?;
        let mut module: *mut c_void = std::ptr::null_mut();
        // SAFETY: the call writes one handle, which `Drop` unloads once, and reads the image as
        // far as the image itself says, which the caller vouches for.
        unsafe {
            context.calls().cuModuleLoadData(&raw mut module, image.as_ptr().cast::<c_void>())
        }?;
        let loaded = Loaded { context: context.clone(), module: Handle(module) };
        Ok(Module { loaded: Arc::new(loaded) })
    }

    /// The kernel `name` of the module.
    ///
    /// # Errors
    /// When the module has no such kernel (code 500).
    pub fn function(&self, name: &str) -> Result<Function, CudaError> {
        let name = CString::new(name).map_err(|_| invalid("cuModuleGetFunction"))?;
        let _entered = self.loaded.context.enter()?;
        let mut function: *mut c_void = std::ptr::null_mut();
        // SAFETY: the call writes one handle, which is good while the module is loaded, and reads
        // a string with its end.
        unsafe {
            self.loaded.context.calls().cuModuleGetFunction(
                &raw mut function,
                self.loaded.module.0,
                name.as_ptr(),
            )
        }?;
        let function = FunctionHandle(Handle(function));
        Ok(Function { function, module: self.clone() })
    }
}

impl Function {
    /// Queues one launch of `grid` blocks of `block` threads each, without shared memory that is
    /// sized at launch. The arguments are read before the call returns.
    ///
    /// # Errors
    /// When the driver refuses the launch, or an earlier one failed in a way that stays.
    ///
    /// # Safety
    /// `params` holds one pointer for each parameter of the kernel, to a value of its type; what
    /// the kernel reads and writes stays allocated until the stream has run it; and nothing else
    /// writes there, or reads what it writes, until then.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        grid: [u32; 3],
        block: [u32; 3],
        params: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let _entered = self.module.loaded.context.enter()?;
        let ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]) = (grid, block);
        // SAFETY: function and stream are alive, and the caller vouches for the parameters.
        unsafe {
            self.module.loaded.context.calls().cuLaunchKernel(
                self.function.0.0,
                grid_x,
                grid_y,
                grid_z,
                block_x,
                block_y,
                block_z,
                0,
                stream.raw(),
                params.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        dropped(self.context.enter().and_then(|_entered| {
            // SAFETY: the module was loaded once, and every function of it holds the module.
            unsafe { self.context.calls().cuModuleUnload(self.module.0) }
        }));
    }
}
