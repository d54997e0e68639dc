//! The kernels compiled at run time by NVRTC, for the very GPU, with the results kept on disk.
//!
//! The PTX that this crate carries serves every GPU and needs none of this. This is for who wants
//! the code of a newer compiler, or no compilation at all at the second start: NVRTC must be
//! installed (the library only, no toolkit), and the cache must be a folder that nobody else writes
//! to, because what lies there runs on the GPU.
//!
//! A cached image is named by XXH3-128 of source, options, compiler version and architecture, and
//! carries its own length and XXH3-128. One that is short, torn or of another name's content is
//! compiled again and replaced; the folder may be emptied at any time.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use libloading::Library;
use libloading::os::unix;

use crate::driver::{Context, CudaError, Module};
use crate::launch::Kernels;
use crate::twin;

const SOURCE: &str = include_str!("../cuda/kvtide.cu");
/// Options of every compilation; the architecture comes with them.
const OPTIONS: [&CStr; 2] = [c"--std=c++17", c"--fmad=false"];
/// The library's names, newest first.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
/// What a cached image starts with, before length and sum.
const MAGIC: &[u8; 8] = b"KVCUBIN1";
/// Bytes before a cached image: magic, length, sum.
const HEADER_BYTES: usize = 32;
/// Largest image that is believed; ours are some 50 KiB.
const IMAGE_BYTES_MAX: usize = 64 << 20;

/// Why there are no kernels compiled at run time.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NvrtcError {
    /// The library is not installed.
    #[error("NVRTC is not installed ({0}): install the CUDA runtime compiler or leave it off")]
    NoLibrary(String),
    /// The library lacks a call.
    #[error("NVRTC lacks {0}: install CUDA 12.4 or newer")]
    MissingSymbol(&'static str),
    /// A call of the library failed.
    #[error("{call} failed with NVRTC error {code}: {log}")]
    Failed {
        /// Which call.
        call: &'static str,
        /// NVRTC's code.
        code: i32,
        /// What the compiler said; may be empty.
        log: String,
    },
    /// The image has a size that no image of these kernels has.
    #[error("NVRTC made an image of {0} bytes, which is not believed")]
    Size(usize),
    /// The driver refused the image.
    #[error("the driver refused the kernels that NVRTC made: {0}")]
    Driver(#[from] CudaError),
}

type Program = *mut c_void;

/// NVRTC's calls that are needed; codes come back as plain integers, so that one that is not known
/// here is a number and not undefined behaviour.
struct Calls {
    // SAFETY: the types are those of NVRTC's header; each call says why its arguments are right.
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    // SAFETY: as above.
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    image_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    image: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
}

/// The compiler. Its library stays open for as long as the value lives.
pub struct Compiler {
    calls: Calls,
    version: (i32, i32),
    // Behind the pointers above; closed after them.
    _libraries: Vec<Library>,
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Compiler").field("version", &self.version).finish_non_exhaustive()
    }
}

impl Compiler {
    /// Opens NVRTC: from `folder`, where both of its libraries must lie, or where the system finds
    /// it.
    ///
    /// # Errors
    /// When it is not there, or too old.
    pub fn open(folder: Option<&Path>) -> Result<Compiler, NvrtcError> {
        let mut libraries = Vec::new();
        if let Some(folder) = folder {
            // NVRTC opens this one by its bare name, which is found once it is loaded.
            libraries.push(open(&builtins(folder)?, unix::RTLD_GLOBAL)?);
        }
        let mut failed = String::new();
        let mut found = None;
        for name in NAMES {
            let path = folder.map_or_else(|| PathBuf::from(name), |folder| folder.join(name));
            match open(&path, 0) {
                Ok(library) => {
                    found = Some(library);
                    break;
                }
                Err(error) if failed.is_empty() => failed = error.to_string(),
                Err(_) => {}
            }
        }
        let library = found.ok_or(NvrtcError::NoLibrary(failed))?;
        let calls = Calls::find(&library)?;
        libraries.push(library);
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the call writes two integers.
        let code = unsafe { (calls.version)(&raw mut major, &raw mut minor) };
        must("nvrtcVersion", code, String::new)?;
        Ok(Compiler { calls, version: (major, minor), _libraries: libraries })
    }

    /// NVRTC's version, as (major, minor).
    #[must_use]
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// The kernels as an image for a GPU of compute capability `compute`: from `cache` if a whole
    /// one lies there, else compiled and put there. Blocks for some seconds when it compiles.
    ///
    /// # Errors
    /// What NVRTC says. A cache that cannot be read or written is only a cache that is empty.
    pub fn image(&self, compute: (u32, u32), cache: &Path) -> Result<Vec<u8>, NvrtcError> {
        let architecture = format!("--gpu-architecture=sm_{}{}", compute.0, compute.1);
        let path = cache.join(format!("kvtide-{}.cubin", self.key(&architecture)));
        if let Some(image) = read(&path) {
            return Ok(image);
        }
        let image = self.compile(&architecture)?;
        // The image is at hand, so what the cache cannot keep is compiled again next time.
        let _ = write(&path, &image);
        Ok(image)
    }

    /// The kernels, loaded into `context`; see [`image`](Compiler::image).
    ///
    /// # Errors
    /// What NVRTC or the driver says.
    pub fn load(&self, context: &Context, cache: &Path) -> Result<Kernels, NvrtcError> {
        let image = self.image(context.info().compute, cache)?;
        // SAFETY: the image is whole: NVRTC just made it, or its length and sum were compared with
        // those that were written with it, in a folder that only this process's user writes to.
        let module = unsafe { Module::load_cubin(context, &image) }?;
        Ok(Kernels::from_module(context, &module)?)
    }

    /// What an image depends on, as one name.
    fn key(&self, architecture: &str) -> String {
        let (major, minor) = self.version;
        let all = format!("{SOURCE}\0{OPTIONS:?}\0{architecture}\0{major}.{minor}");
        let [low, high] = twin::sum(all.as_bytes()).unwrap_or_default();
        format!("{high:016x}{low:016x}")
    }

    fn compile(&self, architecture: &str) -> Result<Vec<u8>, NvrtcError> {
        let source = text(SOURCE)?;
        let architecture = text(architecture)?;
        let mut program = Guard { calls: &self.calls, program: std::ptr::null_mut() };
        // SAFETY: two strings with their ends, no headers; the program is destroyed by the guard.
        let code = unsafe {
            let none = std::ptr::null();
            let name = c"kvtide.cu".as_ptr();
            (self.calls.create)(&raw mut program.program, source.as_ptr(), name, 0, none, none)
        };
        must("nvrtcCreateProgram", code, String::new)?;
        let [standard, contraction] = OPTIONS.map(CStr::as_ptr);
        let options = [architecture.as_ptr(), standard, contraction];
        let count = options.len() as c_int;
        // SAFETY: as many strings with their ends as said, alive over the call.
        let code = unsafe { (self.calls.compile)(program.program, count, options.as_ptr()) };
        must("nvrtcCompileProgram", code, || program.log())?;
        let mut bytes = 0;
        // SAFETY: the program is compiled; the call writes one size.
        let code = unsafe { (self.calls.image_size)(program.program, &raw mut bytes) };
        must("nvrtcGetCUBINSize", code, String::new)?;
        if bytes == 0 || bytes > IMAGE_BYTES_MAX {
            return Err(NvrtcError::Size(bytes));
        }
        let mut image = vec![0u8; bytes];
        // SAFETY: the buffer has the size that the call was just said to need.
        let code = unsafe { (self.calls.image)(program.program, image.as_mut_ptr().cast()) };
        must("nvrtcGetCUBIN", code, String::new)?;
        Ok(image)
    }
}

impl Calls {
    fn find(library: &Library) -> Result<Calls, NvrtcError> {
        // SAFETY: in each line the type is that of the call in NVRTC's header, with the code as an
        // integer and the program as an untyped pointer. The pointers are kept beside the library.
        unsafe {
            Ok(Calls {
                version: symbol(library, "nvrtcVersion")?,
                create: symbol(library, "nvrtcCreateProgram")?,
                destroy: symbol(library, "nvrtcDestroyProgram")?,
                compile: symbol(library, "nvrtcCompileProgram")?,
                log_size: symbol(library, "nvrtcGetProgramLogSize")?,
                log: symbol(library, "nvrtcGetProgramLog")?,
                image_size: symbol(library, "nvrtcGetCUBINSize")?,
                image: symbol(library, "nvrtcGetCUBIN")?,
            })
        }
    }
}

/// A program of NVRTC, destroyed when it goes.
struct Guard<'a> {
    calls: &'a Calls,
    program: Program,
}

impl Guard<'_> {
    fn log(&self) -> String {
        let mut bytes = 0;
        // SAFETY: the program is alive; the call writes one size.
        let code = unsafe { (self.calls.log_size)(self.program, &raw mut bytes) };
        if code != 0 || bytes > IMAGE_BYTES_MAX {
            return String::new();
        }
        let mut log = vec![0u8; bytes];
        // SAFETY: the buffer has the size that the call was just said to need.
        let code = unsafe { (self.calls.log)(self.program, log.as_mut_ptr().cast()) };
        let said = String::from_utf8_lossy(&log);
        if code == 0 { said.trim_end_matches('\0').to_owned() } else { String::new() }
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: created once, destroyed once, not used after.
            unsafe { (self.calls.destroy)(&raw mut self.program) };
        }
    }
}

fn open(path: &Path, flags: i32) -> Result<Library, NvrtcError> {
    // SAFETY: NVRTC's libraries have initialisers without demands on their caller.
    let opened = unsafe { unix::Library::open(Some(path), unix::RTLD_NOW | flags) };
    opened.map(Library::from).map_err(|error| NvrtcError::NoLibrary(error.to_string()))
}

/// The library of built-in functions in a folder; its name has the version in it.
fn builtins(folder: &Path) -> Result<PathBuf, NvrtcError> {
    let none = || NvrtcError::NoLibrary(format!("no libnvrtc-builtins in {}", folder.display()));
    let entries = fs::read_dir(folder).map_err(|_| none())?;
    entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|path| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.starts_with("libnvrtc-builtins.so") && !name.contains("alt")
        })
        .ok_or_else(none)
}

/// # Safety
/// `T` must be the function pointer type of the symbol, not used after the library is closed.
unsafe fn symbol<T: Copy>(library: &Library, name: &'static str) -> Result<T, NvrtcError> {
    // SAFETY: the caller's promise.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|_| NvrtcError::MissingSymbol(name))
}

fn must(call: &'static str, code: c_int, log: impl FnOnce() -> String) -> Result<(), NvrtcError> {
    if code == 0 { Ok(()) } else { Err(NvrtcError::Failed { call, code, log: log() }) }
}

fn text(text: &str) -> Result<CString, NvrtcError> {
    CString::new(text).map_err(|_| NvrtcError::Size(text.len()))
}

/// A whole image from the cache, or `None`.
fn read(path: &Path) -> Option<Vec<u8>> {
    let bytes = fs::metadata(path).ok()?.len();
    if bytes > (IMAGE_BYTES_MAX + HEADER_BYTES) as u64 {
        return None;
    }
    let mut all = fs::read(path).ok()?;
    let header: [u8; HEADER_BYTES] = *all.first_chunk()?;
    let image = all.split_off(HEADER_BYTES);
    (header == header_of(&image)?).then_some(image)
}

/// Written beside and renamed, so that a reader sees all of it or nothing.
fn write(path: &Path, image: &[u8]) -> io::Result<()> {
    let header = header_of(image).ok_or(io::ErrorKind::InvalidData)?;
    let beside = path.with_extension(format!("{}.new", std::process::id()));
    let written = fs::File::create(&beside).and_then(|mut file| {
        file.write_all(&header)?;
        file.write_all(image)
    });
    written.and_then(|()| fs::rename(&beside, path)).inspect_err(|_| {
        let _ = fs::remove_file(&beside);
    })
}

/// Magic, length and sum of an image; `None` for one that is too short to be one.
fn header_of(image: &[u8]) -> Option<[u8; HEADER_BYTES]> {
    let [low, high] = twin::sum(image)?;
    let mut header = [0; HEADER_BYTES];
    let fields = MAGIC
        .iter()
        .copied()
        .chain((image.len() as u64).to_le_bytes())
        .chain(low.to_le_bytes())
        .chain(high.to_le_bytes());
    for (byte, field) in header.iter_mut().zip(fields) {
        *byte = field;
    }
    Some(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// NVRTC as `ptx/regenerate.py` keeps it.
    fn installed() -> Option<PathBuf> {
        let target = std::env::var_os("CARGO_TARGET_DIR")
            .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"), PathBuf::from);
        let folder = target.join("nvrtc-12.4.127/nvidia/cuda_nvrtc/lib");
        folder.is_dir().then_some(folder)
    }

    #[test]
    fn an_image_is_compiled_once_and_a_damaged_one_again() {
        let Some(folder) = installed() else {
            let mut stderr = io::stderr();
            writeln!(stderr, "\n  SKIPPED: no NVRTC here (kernels/ptx/regenerate.py gets it)")
                .unwrap();
            return;
        };
        let compiler = Compiler::open(Some(&folder)).unwrap();
        assert_eq!(compiler.version(), (12, 4));
        let cache = tempfile::tempdir().unwrap();
        let image = compiler.image((9, 0), cache.path()).unwrap();
        assert!(image.starts_with(b"\x7fELF"));
        let kept: Vec<PathBuf> =
            fs::read_dir(cache.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(kept.len(), 1, "{kept:?}");
        // What lies there is what is taken: another whole image under that name.
        let other = vec![7; 300];
        write(&kept[0], &other).unwrap();
        assert_eq!(compiler.image((9, 0), cache.path()).unwrap(), other);
        let good = {
            fs::remove_file(&kept[0]).unwrap();
            assert_eq!(compiler.image((9, 0), cache.path()).unwrap(), image, "reproducible");
            fs::read(&kept[0]).unwrap()
        };
        for damage in [good.len() / 2, 0, 9, 20, good.len() - 1] {
            let mut bad = good.clone();
            bad[damage] ^= 1;
            fs::write(&kept[0], &bad).unwrap();
            assert_eq!(read(&kept[0]), None, "byte {damage}");
        }
        fs::write(&kept[0], &good[..good.len() - 1]).unwrap();
        assert_eq!(compiler.image((9, 0), cache.path()).unwrap(), image);
        assert_eq!(fs::read(&kept[0]).unwrap(), good, "replaced");
        // A cache that cannot be written only costs time.
        assert_eq!(compiler.image((9, 0), Path::new("/nonexistent")).unwrap(), image);
        assert_ne!(compiler.key("sm_90"), compiler.key("sm_80"));
        let refused = compiler.compile("--gpu-architecture=sm_1").unwrap_err();
        assert!(matches!(refused, NvrtcError::Failed { call: "nvrtcCompileProgram", .. }));
    }

    #[test]
    fn without_the_library_one_line_says_so() {
        let empty = tempfile::tempdir().unwrap();
        let error = Compiler::open(Some(empty.path())).unwrap_err();
        assert!(error.to_string().starts_with("NVRTC is not installed"), "{error}");
    }
}
