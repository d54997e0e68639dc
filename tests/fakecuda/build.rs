//! Names the library as the driver's is named, so that one that was opened by its path is also
//! found by those who ask for it by name.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
    println!("cargo::rerun-if-changed=build.rs");
}
