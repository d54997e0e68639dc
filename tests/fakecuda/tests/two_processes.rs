//! Memory and events shared between processes, and either of them dying.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by a panic")]

mod common;

use std::os::fd::{AsFd, OwnedFd};
use std::process::Stdio;

use common::{
    Peer, context, copy, download, fill, hex, is_child, listen, pattern, run_child, say, unhex,
    upload,
};
use kvtide_kernels::driver::{
    Context, CudaError, DeviceBuffer, Event, ImportedIpc, ImportedVmm, Stream, VmmBuffer,
    export_fd_of, failed_drops, legacy_ipc_capable,
};

const BYTES: usize = 1 << 20;

/// Free memory of the device, as this process sees it.
fn free(context: &Context) -> u64 {
    context.memory().unwrap().0
}

/// The importer of most tests: a helper that ends at once when no test started it.
///
/// It opens the memory and, where one is named, waits for the event on a stream; says what it
/// found; and on a word writes other bytes, records the event or closes.
#[test]
fn importer() {
    if !is_child("importer") {
        return;
    }
    let context = context();
    let before = free(&context);
    let stream = Stream::new(&context).unwrap();
    let memory = ImportedIpc::open(&context, unhex(&listen().unwrap())).unwrap();
    assert_eq!(free(&context), before - BYTES as u64, "an import counts");
    let again = ImportedIpc::open(&context, unhex(&listen().unwrap())).unwrap();
    assert_eq!(again.address(), memory.address(), "a handle opened again is the same memory");
    drop(again);
    let event = listen().unwrap();
    let event = (event != "-").then(|| Event::open(&context, unhex(&event)).unwrap());
    if let Some(event) = &event {
        stream.wait(event).unwrap();
    }
    say("open");
    let found = download(&stream, memory.address(), BYTES).unwrap();
    say(if found == pattern(5, BYTES) { "equal" } else { "differs" });
    while let Some(word) = listen() {
        match word.as_str() {
            "write" => {
                fill(&stream, memory.address(), 77, BYTES as u64).unwrap();
                if let Some(event) = &event {
                    event.record(&stream).unwrap();
                } else {
                    stream.synchronize().unwrap();
                }
                say("written");
            }
            "read" => {
                let found = download(&stream, memory.address(), 4096).unwrap();
                say(&format!("{}", found[0]));
            }
            _ => break,
        }
    }
    drop(memory);
    assert_eq!(free(&context), before);
    assert_eq!((failed_drops(), fakecuda::violations()), (0, 0));
    say("closed");
}

/// Starts the importer and gives it the memory.
fn give(memory: &[u8; 64], event: Option<&[u8; 64]>) -> Peer {
    let mut peer = Peer::start("importer", &[]);
    peer.tell(&hex(memory));
    peer.tell(&hex(memory));
    peer.tell(&event.map_or("-".to_owned(), hex));
    assert_eq!(peer.hear(), "open");
    peer
}

#[test]
fn two_processes_share_memory_in_the_order_of_an_event() {
    const ME: &str = "two_processes_share_memory_in_the_order_of_an_event";
    if !is_child(ME) {
        run_child(ME, &[]);
        run_child(ME, &[("FAKECUDA_JITTER_US", "2000")]);
        return;
    }
    let context = context();
    let stream = Stream::new(&context).unwrap();
    let buffer = DeviceBuffer::alloc(&context, BYTES as u64).unwrap();
    let source = DeviceBuffer::alloc(&context, BYTES as u64).unwrap();
    upload(&stream, source.address(), &pattern(5, BYTES)).unwrap();
    let event = Event::interprocess(&context).unwrap();
    assert!(Event::new(&context).unwrap().ipc_handle().is_err(), "an event of this process only");

    // The bytes come late: the importer's stream must wait for the event, also of a process.
    let fault = common::inject("cuMemcpyDtoDAsync_v2@1=stall");
    copy(&stream, buffer.address(), source.address(), BYTES as u64).unwrap();
    event.record(&stream).unwrap();
    let handle = buffer.ipc_handle().unwrap();
    assert!(legacy_ipc_capable(buffer.address()).unwrap());
    let mut peer = give(&handle, Some(&event.ipc_handle().unwrap()));
    std::thread::sleep(std::time::Duration::from_millis(20));
    drop(fault);
    assert_eq!(peer.hear(), "equal");

    // And the other way, with the same event recorded there.
    peer.tell("write");
    assert_eq!(peer.hear(), "written");
    stream.wait(&event).unwrap();
    assert_eq!(download(&stream, buffer.address(), BYTES).unwrap(), vec![77; BYTES]);
    peer.tell("close");
    assert_eq!(peer.hear(), "closed");
    peer.end();
    drop(buffer);
    assert_eq!((failed_drops(), fakecuda::violations()), (0, 0));
}

#[test]
fn what_cannot_be_opened_is_refused() {
    const ME: &str = "what_cannot_be_opened_is_refused";
    if !is_child(ME) {
        run_child(ME, &[]);
        return;
    }
    let context = context();
    let buffer = DeviceBuffer::alloc(&context, BYTES as u64).unwrap();
    let event = Event::interprocess(&context).unwrap();
    let (memory, event) = (buffer.ipc_handle().unwrap(), event.ipc_handle().unwrap());
    let code = |opened: Result<ImportedIpc, CudaError>| opened.unwrap_err().code;
    assert_eq!(code(ImportedIpc::open(&context, memory)), 201, "its own memory");
    assert_eq!(code(ImportedIpc::open(&context, [0; 64])), 1, "no handle");
    assert_eq!(code(ImportedIpc::open(&context, event)), 1, "an event's handle");
    assert_eq!(Event::open(&context, event).unwrap_err().code, 201, "its own event");
    assert_eq!(Event::open(&context, memory).unwrap_err().code, 1, "a handle of memory");

    let created = VmmBuffer::create(&context, 1).unwrap();
    assert_eq!(created.bytes(), 2 << 20);
    assert!(!legacy_ipc_capable(created.address()).unwrap());
    assert!(export_fd_of(created.address()).is_ok());
    assert_eq!(export_fd_of(buffer.address()).unwrap_err().code, 1, "not created memory");
    let file: OwnedFd = tempfile::tempfile().unwrap().into();
    assert_eq!(ImportedVmm::open(&context, file, 2 << 20).unwrap_err().code, 1, "another file");
    let fd = created.export_fd().unwrap();
    assert_eq!(ImportedVmm::open(&context, fd, 4 << 20).unwrap_err().code, 1, "not its size");
    let before = free(&context);
    let fd = created.export_fd().unwrap();
    assert_eq!(ImportedVmm::open(&context, fd, 1000).unwrap_err().code, 1, "not whole pages");
    assert_eq!(free(&context), before, "what failed midway was undone");
    assert_eq!((failed_drops(), fakecuda::violations()), (0, 0));
}

/// The importer of created memory: its standard input is the descriptor.
#[test]
fn vmm_importer() {
    if !is_child("vmm_importer") {
        return;
    }
    let context = context();
    let before = free(&context);
    let stream = Stream::new(&context).unwrap();
    let fd = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let memory = ImportedVmm::open(&context, fd, 4 << 20).unwrap();
    let found = download(&stream, memory.address(), 4 << 20).unwrap();
    assert_eq!(found, pattern(9, 4 << 20));
    fill(&stream, memory.address() + (2 << 20), 3, 2 << 20).unwrap();
    stream.synchronize().unwrap();
    say("written");
    drop(memory);
    assert_eq!(free(&context), before);
    assert_eq!((failed_drops(), fakecuda::violations()), (0, 0));
}

#[test]
fn created_memory_travels_as_a_descriptor() {
    const ME: &str = "created_memory_travels_as_a_descriptor";
    if !is_child(ME) {
        run_child(ME, &[]);
        return;
    }
    let context = context();
    let before = free(&context);
    let stream = Stream::new(&context).unwrap();
    let memory = VmmBuffer::create(&context, (4 << 20) - 5).unwrap();
    assert_eq!(memory.bytes(), 4 << 20);
    assert_eq!(memory.address() % (2 << 20), 0);
    upload(&stream, memory.address(), &pattern(9, 4 << 20)).unwrap();
    let fd = export_fd_of(memory.address() + 12345).unwrap();
    let mut peer = Peer::start_with("vmm_importer", &[], Stdio::from(fd));
    assert_eq!(peer.hear(), "written");
    let found = download(&stream, memory.address(), 4 << 20).unwrap();
    assert_eq!(found[..2 << 20], pattern(9, 4 << 20)[..2 << 20]);
    assert_eq!(found[2 << 20..], vec![3; 2 << 20]);
    peer.end();

    // Dropped while it is mapped elsewhere, it lives on there: no violation.
    let fd = memory.export_fd().unwrap();
    let imported = ImportedVmm::open(&context, fd, 4 << 20).unwrap();
    drop(memory);
    assert_eq!(download(&stream, imported.address(), 8).unwrap(), pattern(9, 8));
    drop(imported);
    assert_eq!(free(&context), before);
    assert_eq!((failed_drops(), fakecuda::violations()), (0, 0));
}

/// Exports memory and waits to be killed.
#[test]
fn exporter() {
    if !is_child("exporter") {
        return;
    }
    let context = context();
    let stream = Stream::new(&context).unwrap();
    let buffer = DeviceBuffer::alloc(&context, BYTES as u64).unwrap();
    let event = Event::interprocess(&context).unwrap();
    upload(&stream, buffer.address(), &pattern(6, BYTES)).unwrap();
    // The event is recorded behind work that never ends.
    fakecuda::inject("cuMemsetD8Async@1=stall");
    fill(&stream, buffer.address(), 6, 1).unwrap();
    event.record(&stream).unwrap();
    say(&hex(&buffer.ipc_handle().unwrap()));
    say(&hex(&event.ipc_handle().unwrap()));
    assert_eq!(listen(), None);
}

#[test]
fn the_exporter_is_killed_while_its_memory_is_read() {
    const ME: &str = "the_exporter_is_killed_while_its_memory_is_read";
    if !is_child(ME) {
        run_child(ME, &[]);
        return;
    }
    let context = context();
    let before = free(&context);
    let (stream, waiting) = (Stream::new(&context).unwrap(), Stream::new(&context).unwrap());
    let mut peer = Peer::start("exporter", &[]);
    let (handle, event) = (unhex(&peer.hear()), unhex(&peer.hear()));
    let memory = ImportedIpc::open(&context, handle).unwrap();
    let event = Event::open(&context, event).unwrap();
    waiting.wait(&event).unwrap();
    let target = DeviceBuffer::alloc(&context, BYTES as u64).unwrap();
    for round in 0..200 {
        copy(&stream, target.address(), memory.address(), BYTES as u64).unwrap();
        if round == 100 {
            assert!(!waiting.is_done().unwrap());
            peer.kill();
        }
    }
    stream.synchronize().unwrap();
    // (The first byte was about to be filled.)
    assert_eq!(download(&stream, target.address(), BYTES).unwrap(), pattern(6, BYTES));
    waiting.synchronize().unwrap();
    memory.close().unwrap();
    drop(target);
    assert_eq!(free(&context), before, "the dead process's memory is given back");
    let again = ImportedIpc::open(&context, handle).unwrap_err();
    assert_eq!(again.code, 205, "{again}");
    assert!(Event::open(&context, handle).is_err());
    assert_eq!((failed_drops(), fakecuda::violations()), (0, 0));
}

#[test]
fn memory_that_is_freed_while_it_is_open_elsewhere_is_a_violation() {
    const ME: &str = "memory_that_is_freed_while_it_is_open_elsewhere_is_a_violation";
    if !is_child(ME) {
        let text = run_child(ME, &[]);
        assert_eq!(text.matches("fakecuda: VIOLATION: ").count(), 1, "{text}");
        assert!(text.contains("was freed while it is open in [\"process"), "{text}");
        return;
    }
    let context = context();
    let stream = Stream::new(&context).unwrap();
    let made = || {
        let buffer = DeviceBuffer::alloc(&context, BYTES as u64).unwrap();
        upload(&stream, buffer.address(), &pattern(5, BYTES)).unwrap();
        let mut peer = give(&buffer.ipc_handle().unwrap(), None);
        assert_eq!(peer.hear(), "equal");
        (buffer, peer)
    };
    // Closed first: as it must be.
    let (buffer, mut peer) = made();
    peer.tell("close");
    assert_eq!(peer.hear(), "closed");
    peer.end();
    drop(buffer);
    assert_eq!(fakecuda::violations(), 0);
    // A process that was killed has nothing open any more.
    let (buffer, mut peer) = made();
    peer.kill();
    drop(buffer);
    assert_eq!(fakecuda::violations(), 0);
    // Freed first.
    let (buffer, mut peer) = made();
    drop(buffer);
    assert_eq!(fakecuda::violations(), 1);
    peer.tell("close");
    assert_eq!(peer.hear(), "closed");
    peer.end();
    assert_eq!(failed_drops(), 0);
}
